"""Which mix each chunk of a stage takes, for given layers: the least weighted backward time that fits the stage's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.deadline import check
from mindllm.planning.plan import Plan, activation_room, end_of, fixed_memory, tail_working_memory
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Front, Mixes, Runs
from mindllm.schedules.operations import KINDS
from mindllm.schedules.orders import Orders, alive_in_backward
from mindllm.schedules.simulate import pass_times

COMBINATIONS = 4096  # tried for a stage; fronts are thinned until no more are needed
SHIFTS = 2**14  # neighbors of a split
NEAR = 1500  # neighbors by mixes near a requested time
FINE = 512  # mixes of a chunk among which they are sought


@dataclass(frozen=True)
class NearChoices:
    """Choices of one mix for each chunk of a stage that fit its memory.

    Attributes:
        fronts: mixes of each chunk.
        picks: which of them each choice takes, ``[chunks, choices]``.
        times: of each chunk by kind of operation, with head and tail, ``[kinds, chunks, choices]``.
    """

    fronts: list[Front]
    picks: np.ndarray
    times: np.ndarray

    def mixes(self, index: int) -> tuple[np.ndarray, ...]:
        """Return the counts of the mixes of one choice."""
        return tuple(front.counts[pick[index]] for front, pick in zip(self.fronts, self.picks, strict=True))


class StageChoice:
    """Times of every place for many splits; runs of layers are numbered on their first use.

    ``weights`` are the importance of the backward pass of every place, ``[places]``; with equal weights the time of a
    stage is least. ``alive`` are the micro-batches that must fit in the backward pass of each chunk, by stage,
    ``[vectors, chunks]``.
    """

    def __init__(self, problem: Problem, mixes: Mixes, orders: Orders) -> None:
        self.problem, self.mixes = problem, mixes
        self.kinds = KINDS if problem.v_shape else 2  # of operations: halves of backward passes are another two
        self.alive = alive_in_backward(orders, problem.chunks)
        self.weights = np.ones(problem.places)
        self._numbers: dict[Runs, int] = {}
        self._runs: list[Runs] = []
        self._number_of: dict[tuple[int, int], int] = {}
        self._chosen: dict[tuple[int, tuple[int, ...]], tuple[np.ndarray, tuple] | None] = {}

    def weigh(self, weights: np.ndarray) -> None:
        """Set ``weights`` and forget the choices made with other weights."""
        self.weights = weights
        self._chosen.clear()

    def times(self, counts: np.ndarray, deadline: float = math.inf) -> np.ndarray:
        """Return the times of every place by kind of operation, ``[kinds, places, splits]``; infinite for splits that do not fit.

        ``counts`` are layers per place, ``[splits, places]``.

        Raises:
            OutOfTime: some are missing at ``deadline``.
        """
        numbers = self._number(counts)
        times = np.empty((self.kinds, *counts.shape[::-1]))
        stages = self.problem.stages
        for stage in range(stages):
            places = np.arange(stage, self.problem.places, stages)
            unique, inverse = np.unique(numbers[:, places], axis=0, return_inverse=True)
            choices = []
            for row in unique.tolist():
                check(deadline)
                choices.append(self._choose(stage, tuple(row)))
            unfit = np.full((self.kinds, len(places)), np.inf)
            table = np.stack([choice[0] if choice else unfit for choice in choices], axis=-1)
            times[:, places] = table[..., inverse.ravel()]
        return times

    def plan(self, counts: np.ndarray) -> Plan:
        """Return the plan chosen for one split, ``[places]``; ValueError if none fits the memory."""
        return self.build_plan(counts, [self.chosen_mixes(counts, stage) for stage in range(self.problem.stages)])

    def chosen_mixes(self, counts: np.ndarray, stage: int) -> Sequence[np.ndarray]:
        """Return the counts of the chosen mixes of a stage's chunks in one split; ValueError if none fits."""
        numbers = self._number(counts[None])[0]
        choice = self._choose(stage, tuple(numbers[stage :: self.problem.stages].tolist()))
        if choice is None:
            raise ValueError(f"stage {stage} cannot hold these layers")
        return choice[1]

    def build_plan(self, counts: np.ndarray, mixes: Sequence[Sequence[np.ndarray]]) -> Plan:
        """Return the plan of one split, ``[places]``, with the counts of the mixes of every stage's chunks."""
        numbers, stages = self._number(counts[None])[0], self.problem.stages
        return Plan(
            tuple(
                tuple(self.mixes.written(self._runs[number], mixes[place % stages][place // stages]))
                for place, number in enumerate(numbers)
            )
        )

    def near(self, stage: int, counts: np.ndarray, backward: np.ndarray) -> NearChoices:
        """Return choices of a stage in one split, ``[places]``, with backward times near ``backward``, ``[places]``.

        If none of them fits the memory, return choices from mixes of all times.
        """
        numbers = self._number(counts[None])[0][stage :: self.problem.stages].tolist()
        most = max(2, int(NEAR ** (1 / self.problem.chunks) + 1e-9))
        ends = [sum(end.backward for end in end_of(self.problem, place)) for place in self._places(stage)]
        targets = [backward[place] - end for place, end in zip(self._places(stage), ends, strict=True)]
        fronts = []
        for number, time in zip(numbers, targets, strict=True):
            front = self.mixes.front(self._runs[number], FINE)
            fronts.append(front.take(np.sort(np.argsort(np.abs(front.backward - time), kind="stable")[:most])))
        for tried in (fronts, [self._thin(number) for number in numbers]):
            picks = _product(tuple(len(front.backward) for front in tried))
            room = activation_room(self.problem, stage, [part for number in numbers for part in self._runs[number]])
            picks = picks[:, self._memory(stage, tried, picks) <= room + 1e-9]
            if picks.shape[1]:
                break
        return NearChoices(tried, picks, self._times(stage, [self._runs[number] for number in numbers], tried, picks))

    def _number(self, counts: np.ndarray) -> np.ndarray:
        """Return the number of the run of layers in every place."""
        order = list(self.problem.visits)
        starts = np.empty_like(counts)
        starts[:, order] = counts[:, order].cumsum(axis=1) - counts[:, order]
        codes = starts * (self.problem.layer_count + 1) + counts
        unique, inverse = np.unique(codes, return_inverse=True)
        return np.array([self._run_number(*divmod(code, self.problem.layer_count + 1)) for code in unique.tolist()])[
            inverse.reshape(codes.shape)
        ]

    def _run_number(self, start: int, count: int) -> int:
        if (start, count) not in self._number_of:
            runs = self.mixes.runs(start, count)
            if runs not in self._numbers:
                self._numbers[runs] = len(self._runs)
                self._runs.append(runs)
            self._number_of[start, count] = self._numbers[runs]
        return self._number_of[start, count]

    def _choose(self, stage: int, numbers: tuple[int, ...]) -> tuple[np.ndarray, tuple] | None:
        """Return the times of each chunk of a stage, and the counts of its mixes."""
        key = (stage, numbers)
        if key not in self._chosen:
            self._chosen[key] = self._best(stage, [self._runs[number] for number in numbers], numbers)
        return self._chosen[key]

    def missing(self, counts: np.ndarray) -> tuple[float, int]:
        """Return the MB that limits lack for the lightest mixes of a split, ``[places]``, and the stage that lacks most."""
        numbers = self._number(counts[None])[0]
        lacking = []
        for stage in range(self.problem.stages):
            check(self.mixes.deadline)
            mine = tuple(int(number) for number in numbers[stage :: self.problem.stages])
            fronts, picks = self._combined(mine)
            fixed, *outside = fixed_memory(
                self.problem, stage, [part for number in mine for part in self._runs[number]]
            )
            needed = max(fixed + float(self._memory(stage, fronts, picks).min()), *outside)
            lacking.append((needed - self.problem.per_stage("limit_mb")[stage], stage))
        return max(lacking)

    def _best(self, stage: int, runs: list[Runs], numbers: tuple[int, ...]) -> tuple[np.ndarray, tuple] | None:
        problem, places = self.problem, self._places(stage)
        check(self.mixes.deadline)
        fronts, picks = self._combined(numbers)
        room = activation_room(problem, stage, [part for run in runs for part in run])
        fits = self._memory(stage, fronts, picks) <= room + 1e-9
        if not fits.any():
            return None
        backward = np.array([front.backward[pick] for front, pick in zip(fronts, picks, strict=True)])
        index = int(np.where(fits, self.weights[list(places)] @ backward, np.inf).argmin())
        return (
            self._times(stage, runs, fronts, picks[:, index : index + 1])[..., 0],
            tuple(front.counts[pick[index]] for front, pick in zip(fronts, picks, strict=True)),
        )

    def _times(self, stage: int, runs: Sequence[Runs], fronts: Sequence[Front], picks: np.ndarray) -> np.ndarray:
        """Return times by kind of operation of each chunk of a stage with head and tail, ``[kinds, chunks, choices]``."""
        layers, parts = self.problem.layers, []
        for place, run, front, pick in zip(self._places(stage), runs, fronts, picks, strict=True):
            ends, counts = end_of(self.problem, place), front.counts[pick]
            forward = sum(layers[kind].forward * count for kind, count in run) + sum(end.forward for end in ends)
            weight = sum(layers[kind].weight_gradient * count for kind, count in run)
            again = np.tensordot(counts, self.problem.again, 2)
            parts.append((
                np.full(len(pick), forward),
                front.backward[pick] + sum(end.backward for end in ends),
                weight + sum(end.weight_gradient for end in ends) + again,
                again,
            ))  # fmt: skip
        return pass_times(*np.array(parts).swapaxes(0, 1))[: self.kinds]

    def _places(self, stage: int) -> range:
        return range(stage, self.problem.places, self.problem.stages)

    def _combined(self, numbers: tuple[int, ...]) -> tuple[list[Front], np.ndarray]:
        """Return the fronts of a stage's chunks, and every choice of one mix from each, ``[chunks, choices]``."""
        fronts = [self._thin(number) for number in numbers]
        return fronts, _product(tuple(len(front.backward) for front in fronts))

    def _memory(self, stage: int, fronts: list[Front], picks: np.ndarray) -> np.ndarray:
        """Return activations and working memory at the fullest backward pass, ``[choices]``, MB."""
        places = self._places(stage)
        ends = [sum(end.activation_mb for end in end_of(self.problem, place)) for place in places]
        activations = np.array(
            [front.activation[pick] + end for front, pick, end in zip(fronts, picks, ends, strict=True)]
        )
        moments = [
            (vectors @ activations).max(axis=0)
            + np.maximum(front.working, tail_working_memory(self.problem, place))[pick]
            for vectors, place, front, pick in zip(self.alive[stage], places, fronts, picks, strict=True)
        ]
        return np.max(moments, axis=0)

    def _thin(self, number: int) -> Front:
        """Return the front of a run, thinned so that chunks can be combined."""
        most = max(4 if self.problem.chunks <= 8 else 2, int(COMBINATIONS ** (1 / self.problem.chunks) + 1e-9))
        return self.mixes.front(self._runs[number], most)


def _product(sizes: tuple[int, ...]) -> np.ndarray:
    return np.indices(sizes).reshape(len(sizes), -1)


def shifts(counts: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return splits with one layer moved from a place that has several to another, ``[splits, places]``.

    At most :data:`SHIFTS` of them are drawn at random.
    """
    source, target = np.divmod(np.arange(len(counts) ** 2), len(counts))
    possible = np.flatnonzero((counts[source] > 1) & (source != target))
    if len(possible) > SHIFTS:
        possible = np.sort(random.choice(possible, SHIFTS, replace=False))
    moved = np.repeat(counts[None], len(possible), axis=0)
    rows = np.arange(len(possible))
    moved[rows, source[possible]] -= 1
    moved[rows, target[possible]] += 1
    return moved


def random_shift(counts: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return one of these splits at random; the same split if there is none."""
    sources = np.flatnonzero(counts > 1)
    if not len(sources) or len(counts) == 1:
        return counts
    source = random.choice(sources)
    moved = counts.copy()
    moved[source] -= 1
    moved[(source + random.integers(1, len(counts))) % len(counts)] += 1
    return moved
