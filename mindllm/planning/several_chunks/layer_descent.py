"""Local search over whole layers, judged by the linear program: fractions of layers may be recomputed, none may be split.

The simulated step of whole plans is a poor guide, as it also depends on how recomputation happens to be chosen, and many
chains are nearly as long as the longest. The program's bound for given layers changes smoothly and is close to what the best
recomputation reaches. Its dual values say which layer to move where: as the program is convex, no move gains more than they say.
"""

from __future__ import annotations

import math
import time

import numpy as np

from mindllm.planning.several_chunks.path_program import PathProgram

CLOSE = 3e-4  # simulated and thought step of given layers that count as equal
BETTER = 1e-5
PATHS, TOO_MANY = 300, 500  # kept, and known at most
MOVES = 30  # tried before a split counts as the best of its neighbours


class LayerDescent:
    """Uses ``program`` alone; its bounds on layers are those of the last split that was judged."""

    def __init__(self, program: PathProgram, random: np.random.Generator) -> None:
        self.program, self.random = program, random
        self._gains = np.zeros(program.problem.places)

    def judge(self, totals: np.ndarray, deadline: float, below: float = math.inf) -> float:
        """The program's step for given layers of each place, ``[places]``; not raised further once it is not ``below``."""
        program = self.program
        counts = program.by_kind(totals)
        program.limit_counts(counts, counts)
        bound, values = program.solve()
        while bound < below and time.monotonic() < deadline:
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
        """Moves one layer at a time to the first better neighbour, until none is or ``deadline``."""
        current = self.judge(totals, deadline)
        if not math.isfinite(current):
            return totals, current
        gains, better = self._gains, True
        while better:
            better = False
            for source, target in self._moves(totals, gains):
                if time.monotonic() > deadline:
                    return totals, current
                moved = totals.copy()
                moved[source] -= 1
                moved[target] += 1
                found = self.judge(moved, deadline, current * (1 - BETTER))
                if found < current * (1 - BETTER):
                    totals, current, gains, better = moved, found, self._gains, True
                    break
        return totals, current

    def _moves(self, totals: np.ndarray, gains: np.ndarray) -> np.ndarray:
        """Places to take a layer from and to give it to, the most promising first, ``[moves, 2]``."""
        source, target = np.divmod(np.arange(len(totals) ** 2), len(totals))
        gain = gains[source] - gains[target]
        possible = np.flatnonzero((totals[source] > 1) & (gain > 0))
        first = possible[np.argsort(-gain[possible])[:MOVES]]
        return np.stack([source[first], target[first]], axis=1)

    def shaken(self, totals: np.ndarray) -> np.ndarray:
        """Another split near this one: some stages in a row shift a layer between two chunks, or layers change their places."""
        stages, chunks = self.program.problem.stages, self.program.problem.chunks
        moved = totals.copy()
        if self.random.random() < 0.5:
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
