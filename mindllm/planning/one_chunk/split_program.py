"""The least step over all splits of layers, where a closed form gives the step: a dynamic programme over partial plans.

A partial plan fills the first stages. All that the closed form will ask of it is a few numbers, of which smaller ones are never
worse: the sum of its stages' times and a few more of the schedule. Of the partial plans with the same layers only the Pareto
front is kept. What a step to beat rules out is dropped: stages that alone are too slow for it, and partial plans that the
quickest remaining stages cannot save. Where too many are left, neighbours are merged into one that has the least of each number,
so what is found to be impossible stays proven.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from mindllm.deadline import check
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.stage_table import StageTable

HUGE = 1e200  # time of a stage that does not fit its memory: unlike infinity it may be multiplied by zero
GRAIN = 2.0**-40  # of the step to beat: numbers are rounded down to it, so that sums of the same times are the same
COMPARED = 512  # partial plans of a group with which all others are compared


@dataclass(frozen=True)
class Split:
    """Layers of each stage, and whether partial plans were merged on the way to them."""

    counts: list[int]
    merged: bool


@dataclass(frozen=True)
class Ahead:
    """What partial plans ask of a step, ``[plans]`` each.

    Attributes:
        values: their numbers, ``[numbers, plans]``; the first is the sum of the stages' times.
        beyond: the step is at least the time of all stages and this.
        least: the step is at least this.
    """

    values: np.ndarray
    beyond: np.ndarray
    least: np.ndarray


class SplitProgram(ABC):
    """The dynamic programme of one problem and one closed form, which asks for ``numbers`` of a partial plan."""

    numbers: int

    def __init__(self, problem: Problem, table: StageTable) -> None:
        self.problem, self.table = problem, table
        self.possible = np.isfinite(table.times[0])
        check(table.mixes.deadline)
        self.forward, self.backward = (np.where(self.possible, times, HUGE) for times in table.times)
        check(table.mixes.deadline)
        self.total = self.forward + self.backward
        self.stages, self.layers, self.longest = self.total.shape
        self.more = problem.micro_batches - 1
        self.delay = problem.point_to_point
        self.base = 2 * (self.stages - 1) * self.delay
        counts = np.arange(1, self.longest + 1)
        self.end = np.minimum(np.arange(self.layers)[:, None] + counts, self.layers)

    @abstractmethod
    def alone(self) -> np.ndarray:
        """What a stage alone asks beyond the time of all stages, ``[stages, layers, longest]``."""

    @abstractmethod
    def extend(
        self,
        stage: int,
        values: np.ndarray,
        forward: np.ndarray,
        backward: np.ndarray,
        rest: np.ndarray,
        near: np.ndarray,
    ) -> Ahead:
        """Adds a stage to partial plans.

        ``rest`` is the least time of all stages behind, ``near`` that of the next :meth:`looks_ahead`, ``[plans]``.
        """

    def looks_ahead(self, stage: int) -> int:
        """For how many stages behind a stage :meth:`extend` needs the least time, beside that of all."""
        return 0

    def no_limit(self) -> float:
        """A step that every split keeps to."""
        slowest = self.total[self.possible].max(initial=0.0) + 2 * self.delay
        return 4.0 * (self.stages + self.more + 1) * float(slowest) + 1.0

    def decide(self, target: float, width: int, deadline: float = math.inf) -> Split | None:
        """A split whose step may be at most ``target``, or None: then every split's step is longer.

        Args:
            target: the step to beat.
            width: partial plans kept of those with the same stages and layers.

        Raises:
            OutOfTime: it was not decided at ``deadline``.
        """
        allowed, rest = self._allowed(target, deadline)
        near = [self._least_of_next(stage, allowed, deadline) for stage in range(self.stages)]
        room = target - self.base - rest[0, 0]
        while room >= 0:
            found = self._pass(target, room, width, allowed, rest, near, deadline)
            if found is None:
                return None
            split, total = found
            left = target - self.base - total
            if left >= room - GRAIN * target * self.stages:
                return split
            room = left
        return None

    def _allowed(self, target: float, deadline: float) -> tuple[np.ndarray, np.ndarray]:
        """Stages that are quick enough for ``target``, and the least time of the stages from each on.

        Returns:
            ``[stages, layers, longest]`` and, by the first layer of a stage, ``[stages + 1, layers + 1]``.
        """
        allowed, alone = self.possible, self.alone()
        crossed = 2 * self.delay * np.arange(self.stages)[:, None, None]
        while True:
            check(deadline)
            before, rest = self._least_sums(allowed, deadline)
            check(deadline)
            first = before[:-1, :-1, None]
            behind = np.stack([rest[stage + 1][self.end] for stage in range(self.stages)])
            kept = allowed & (first + self.total + behind + alone + self.base <= target)
            check(deadline)
            kept &= first + (self.more + 1) * self.total + crossed <= target
            if kept.sum() == allowed.sum():
                return kept, rest
            allowed = kept

    def _least_sums(self, allowed: np.ndarray, deadline: float) -> tuple[np.ndarray, np.ndarray]:
        """Least time of the stages before and from each on, by the first layer, ``[stages + 1, layers + 1]`` each."""
        layers, total = self.layers, np.where(allowed, self.total, np.inf)
        before, rest = np.full((2, self.stages + 1, layers + 1), np.inf)
        before[0, 0] = rest[self.stages, layers] = 0
        for stage in range(self.stages):
            check(deadline)
            value = before[stage, :layers, None] + total[stage]
            for count in range(self.longest):  # value[start, count] reaches start + count + 1
                ends = slice(count + 1, layers + 1)
                np.minimum(before[stage + 1, ends], value[: layers - count, count], out=before[stage + 1, ends])
        for stage in reversed(range(self.stages)):
            check(deadline)
            rest[stage, :layers] = (total[stage] + rest[stage + 1][self.end]).min(axis=1)
        return before, rest

    def _least_of_next(self, stage: int, allowed: np.ndarray, deadline: float) -> np.ndarray:
        """Least time of the next :meth:`looks_ahead` stages behind one, by their first layer, ``[layers + 1]``."""
        check(deadline)
        least, last = np.zeros(self.layers + 1), stage + self.looks_ahead(stage)
        for behind in range(last, stage, -1):
            total = np.where(allowed[behind], self.total[behind], np.inf)
            least = np.append((total + least[self.end]).min(axis=1), np.inf)
        return least

    def _pass(
        self, target: float, room: float, width: int, allowed: np.ndarray, rest: np.ndarray, near: list[np.ndarray],
        deadline: float,
    ) -> tuple[Split, float] | None:  # fmt: skip
        """The split with the least time of all stages where nothing asks for more than ``room`` beyond, and that time."""
        start, values, merged = np.zeros(1, int), np.zeros((self.numbers, 1)), False
        steps = []
        for stage in range(self.stages):
            check(deadline)
            parent, count = np.nonzero(allowed[stage][start])
            first, end = start[parent], start[parent] + count + 1
            times = self.forward[stage, first, count], self.backward[stage, first, count]
            behind = rest[stage + 1, end]
            ahead = self.extend(stage, values[:, parent], *times, behind, near[stage][end])
            fits = ahead.values[0] + behind + ahead.beyond + self.base <= target
            fits &= (ahead.beyond <= room) & (ahead.least <= target)
            index = np.flatnonzero(fits)
            if not len(index):
                return None
            values = np.floor(ahead.values[:, index] / (GRAIN * target)) * (GRAIN * target)
            kept = undominated(end[index], values)
            leaders, values = merge(end[index[kept]], values[:, kept], width)
            merged |= len(leaders) < len(kept)
            index = index[kept[leaders]]
            start = end[index]
            steps.append((parent[index], count[index]))
        return Split(_counts(steps, int(values[0].argmin())), merged), float(values[0].min())


def undominated(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Those that no other of their group is better than, or as good as before them, by group and first value.

    Where a group is large not all of the others are looked at.

    Args:
        group: ``[plans]``.
        values: ``[numbers, plans]``; smaller is better. Quickest where those after the second have few different ones.

    Returns:
        Their indices.
    """
    order = np.lexsort((values[1], values[0], *values[2:], group))
    order = order[_falling(np.stack([*values[2:], group])[:, order], values[1, order])]
    order = order[np.lexsort((*values[::-1, order], group[order]))]
    kept = np.ones(len(order), bool)
    starts = _starts(group[order][None])
    for first, last in zip(starts, [*starts[1:], len(order)], strict=True):
        if last - first > 1:
            mine = values[1:, order[first:last]]
            others = mine[:, :COMPARED]
            beaten = (others[:, None, :] <= mine[:, :, None]).all(axis=0)
            kept[first:last] = ~np.tril(beaten, -1).any(axis=1)
    return order[kept]


def _starts(keys: np.ndarray) -> np.ndarray:
    """Where a sorted run of equal keys, ``[keys, plans]``, begins."""
    return np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))


def _falling(keys: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Whether a value is less than all before it with the same keys."""
    starts = _starts(keys)
    run = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(value)))
    rank = np.unique(value, return_inverse=True)[1] - run * (len(value) + 1)
    least = np.minimum.accumulate(rank)
    return np.append(True, rank[1:] < least[:-1])


def merge(group: np.ndarray, values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Merges neighbours of groups, which are sorted, until none has more than ``width``.

    Returns:
        Index of the first of each, ``[plans]``, and the least of their values, ``[numbers, plans]``.
    """
    starts = _starts(group[None])
    sizes = np.diff(starts, append=len(group))
    place = np.arange(len(group)) - np.repeat(starts, sizes)
    part = place * width // np.repeat(np.maximum(sizes, width), sizes)
    leaders = _starts(np.stack([group, part]))
    return leaders, np.minimum.reduceat(values, leaders, axis=1)


def _counts(steps: list[tuple[np.ndarray, np.ndarray]], index: int) -> list[int]:
    """Layers of each stage of the plan at ``index`` of the last step."""
    counts = []
    for parent, count in reversed(steps):
        counts.append(int(count[index]) + 1)
        index = int(parent[index])
    return counts[::-1]
