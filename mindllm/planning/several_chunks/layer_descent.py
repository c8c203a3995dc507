"""Local search over whole layers, judged by the linear program: recomputation may be fractional, layers may not.

The simulated step of whole plans is a poor guide: it also depends on the choice of recomputation, and
many chains are nearly as long as the longest. The program's bound for given layers changes smoothly and is close to the step with
the best recomputation. Its dual values show the moves that can gain: the program is convex, so no move gains more.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from mindllm.deadline import passed
from mindllm.planning.several_chunks.path_program import PathProgram

CLOSE = 3e-4  # by which simulated and estimated steps count as equal
BETTER = 1e-5
PATHS, TOO_MANY = 300, 500  # kept, and known at most
MOVES = 30  # of each sort, tried before a split counts as the best of its neighbours
LONGEST_ROW = 64  # stages


class LayerDescent:
    """A descent that owns ``program``, whose bounds on layers are those of the last judged split."""

    def __init__(self, program: PathProgram, random: np.random.Generator) -> None:
        self.program, self.random = program, random
        self._gains = np.zeros(program.problem.places)

    def judge(self, totals: np.ndarray, deadline: float, below: float = math.inf) -> float:
        """Return the program's step for given layers of each place, ``[places]``; stop raising it once it reaches ``below``."""
        program = self.program
        counts = program.by_kind(totals)
        program.limit_counts(counts, counts)
        bound, values = program.solve()
        while bound < below and not passed(deadline):
            simulated, new = program.separate(values)
            if simulated <= bound * (1 + CLOSE) or not new:
                break
            bound, values = program.solve()
        if math.isfinite(bound):
            duals = np.array(program.solver.getSolution().col_dual)[program.counts_of]
            self._gains = duals[np.arange(len(counts)), counts.argmax(axis=1)]
            if len(program.known) > TOO_MANY:
                program.forget_slack_paths(PATHS)
        return bound

    def descend(self, totals: np.ndarray, deadline: float) -> tuple[np.ndarray, float]:
        """Move layers to the first better neighbor until there is none, or until ``deadline``."""
        current = self.judge(totals, deadline)
        if not math.isfinite(current):
            return totals, current
        gains, better = self._gains, True
        while better:
            better = False
            for moved in self._moves(totals, gains):
                if passed(deadline):
                    return totals, current
                value = self.judge(moved, deadline, current * (1 - BETTER))
                if passed(deadline):  # the judgement may be incomplete
                    return totals, current
                if value < current * (1 - BETTER):
                    totals, current, gains, better = moved, value, self._gains, True
                    break
        return totals, current

    def _moves(self, totals: np.ndarray, gains: np.ndarray) -> list[np.ndarray]:
        """Return neighbors of a split, the most promising first."""
        moves = [*self._single_moves(totals, gains), *self._row_moves(totals, gains)]
        return [moved for _, moved in sorted(moves, key=lambda each: -each[0])]

    def _single_moves(self, totals: np.ndarray, gains: np.ndarray) -> list[tuple[float, np.ndarray]]:
        """Return splits with one layer moved between two places, and their possible gains."""
        source, target = np.divmod(np.arange(len(totals) ** 2), len(totals))
        gain = gains[source] - gains[target]
        possible = np.flatnonzero((totals[source] > 1) & (gain > 0))
        first = possible[np.argsort(-gain[possible])[:MOVES]]
        return [(float(gain[move]), _moved(totals, source[move : move + 1], target[move : move + 1])) for move in first]

    def _row_moves(self, totals: np.ndarray, gains: np.ndarray) -> list[tuple[float, np.ndarray]]:
        """Return splits where consecutive stages move a layer each between two chunks, and their possible gains per layer.

        Good splits change from stage to stage in few places. A step between two layer counts moves with all stages between them.
        """
        stages = self.program.problem.stages
        by_chunk = gains.reshape(-1, stages)
        empty = np.pad((totals.reshape(-1, stages) <= 1).cumsum(axis=1), ((0, 0), (1, 0)))
        moves = []
        for source, target in itertools.permutations(range(len(by_chunk)), 2):
            sums = np.append(0.0, (by_chunk[source] - by_chunk[target]).cumsum())
            for length in range(2, min(stages, LONGEST_ROW) + 1):
                possible = empty[source, length:] == empty[source, :-length]
                gain = np.where(possible, sums[length:] - sums[:-length], 0.0) / length
                first = int(gain.argmax())
                if gain[first] > 0:
                    row = np.arange(first, first + length)
                    moves.append((float(gain[first]), source * stages + row, target * stages + row))
        moves.sort(key=lambda each: -each[0])
        return [(gain, _moved(totals, sources, targets)) for gain, sources, targets in moves[:MOVES]]

    def shaken(self, totals: np.ndarray) -> np.ndarray:
        """Return a random split nearby: a row of stages shifts a layer between two chunks, or layers change places."""
        stages, chunks = self.program.problem.stages, self.program.problem.chunks
        moved = totals.copy()
        if len(moved) == 1:
            return moved
        if self.random.random() < 0.5 and chunks > 1:
            first, length = self.random.integers(stages), self.random.integers(1, stages // 2 + 2)
            row = (first + np.arange(length)) % stages
            source, target = self.random.permutation(chunks)[:2]
            row = row[moved[source * stages + row] > 1]
            moved[source * stages + row] -= 1
            moved[target * stages + row] += 1
        else:
            for _ in range(self.random.integers(1, 4)):
                source, target = self.random.permutation(len(moved))[:2]
                if moved[source] > 1:
                    moved[source] -= 1
                    moved[target] += 1
        return moved


def _moved(totals: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    moved = totals.copy()
    moved[sources] -= 1
    moved[targets] += 1
    return moved
