"""The least step over all splits of layers, where a closed form gives the step: a dynamic program over partial plans.

A partial plan fills the first stages. All that the closed form will ask of it is a few numbers, of which smaller ones are never
worse: the sum of its stages' times and a few more of the schedule. Of the partial plans with the same layers only the Pareto
front is kept. What a step to beat rules out is dropped: stages that alone are too slow for it, and partial plans that the
quickest remaining stages cannot save. Where too many are left, neighbors are merged into one that has the least of each number,
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
class Extension:
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
    """The dynamic program of one problem and one closed form, which asks for ``numbers`` of a partial plan."""

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
        """Return the time of a single stage beyond the time of all stages, ``[stages, layers, longest]``."""

    @abstractmethod
    def extend(
        self,
        stage: int,
        values: np.ndarray,
        forward: np.ndarray,
        backward: np.ndarray,
        rest: np.ndarray,
        near: np.ndarray,
    ) -> Extension:
        """Add a stage to partial plans.

        ``rest`` is the least time of all later stages, ``near`` the least time of the next :meth:`lookahead`, ``[plans]``.
        """

    def lookahead(self, stage: int) -> int:
        """Return the number of stages after ``stage`` whose least time :meth:`extend` needs separately."""
        return 0

    def upper_bound(self) -> float:
        """Return a step that every split meets."""
        slowest = self.total[self.possible].max(initial=0.0) + 2 * self.delay
        return 4.0 * (self.stages + self.more + 1) * float(slowest) + 1.0

    def decide(self, target: float, width: int, deadline: float = math.inf) -> Split | None:
        """Return a split whose step may be at most ``target``; None proves that the step of every split is longer.

        Args:
            target: the step to beat.
            width: partial plans kept per stage and number of layers.
            deadline: when to stop.

        Raises:
            OutOfTime: there was no decision before ``deadline``.
        """
        allowed, rest = self._allowed(target, deadline)
        near = [self._least_ahead(stage, allowed, deadline) for stage in range(self.stages)]
        room = target - self.base - rest[0, 0]
        while room >= 0:
            result = self._pass(target, room, width, allowed, rest, near, deadline)
            if result is None:
                return None
            split, total = result
            slack = target - self.base - total
            if slack >= room - GRAIN * target * self.stages:
                return split
            room = slack
        return None

    def _allowed(self, target: float, deadline: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the stages that are quick enough for ``target``, and the least time from each stage on.

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
            later = np.stack([rest[stage + 1][self.end] for stage in range(self.stages)])
            quick = allowed & (first + self.total + later + alone + self.base <= target)
            check(deadline)
            quick &= first + (self.more + 1) * self.total + crossed <= target
            if quick.sum() == allowed.sum():
                return quick, rest
            allowed = quick

    def _least_sums(self, allowed: np.ndarray, deadline: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the least time of the stages before and from each on, by the first layer, ``[stages + 1, layers + 1]`` each."""
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

    def _least_ahead(self, stage: int, allowed: np.ndarray, deadline: float) -> np.ndarray:
        """Return the least time of the next :meth:`lookahead` stages, by their first layer, ``[layers + 1]``."""
        check(deadline)
        least, last = np.zeros(self.layers + 1), stage + self.lookahead(stage)
        for later in range(last, stage, -1):
            total = np.where(allowed[later], self.total[later], np.inf)
            least = np.append((total + least[self.end]).min(axis=1), np.inf)
        return least

    def _pass(
        self, target: float, room: float, width: int, allowed: np.ndarray, rest: np.ndarray, near: list[np.ndarray],
        deadline: float,
    ) -> tuple[Split, float] | None:  # fmt: skip
        """Return the split with the least time of all stages that needs at most ``room`` beyond, and that time."""
        start, values, merged = np.zeros(1, int), np.zeros((self.numbers, 1)), False
        steps = []
        for stage in range(self.stages):
            check(deadline)
            parent, count = np.nonzero(allowed[stage][start])
            first, end = start[parent], start[parent] + count + 1
            times = self.forward[stage, first, count], self.backward[stage, first, count]
            later = rest[stage + 1, end]
            extended = self.extend(stage, values[:, parent], *times, later, near[stage][end])
            fits = extended.values[0] + later + extended.beyond + self.base <= target
            fits &= (extended.beyond <= room) & (extended.least <= target)
            index = np.flatnonzero(fits)
            if not len(index):
                return None
            values = np.floor(extended.values[:, index] / (GRAIN * target)) * (GRAIN * target)
            selected = undominated(end[index], values)
            leaders, values = merge(end[index[selected]], values[:, selected], width)
            merged |= len(leaders) < len(selected)
            index = index[selected[leaders]]
            start = end[index]
            steps.append((parent[index], count[index]))
        return Split(_counts(steps, int(values[0].argmin())), merged), float(values[0].min())


def undominated(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the indices of the plans that no other plan of their group dominates, by group and first value.

    In a large group not all plans are compared. It is fastest if the values after the second have few different ones.

    Args:
        group: ``[plans]``.
        values: ``[numbers, plans]``; smaller is better.
    """
    order = np.lexsort((values[1], values[0], *values[2:], group))
    order = order[_falling(np.stack([*values[2:], group])[:, order], values[1, order])]
    order = order[np.lexsort((*values[::-1, order], group[order]))]
    dominant = np.ones(len(order), bool)
    starts = _starts(group[order][None])
    for first, last in zip(starts, [*starts[1:], len(order)], strict=True):
        if last - first > 1:
            mine = values[1:, order[first:last]]
            rivals = mine[:, :COMPARED]
            beaten = (rivals[:, None, :] <= mine[:, :, None]).all(axis=0)
            dominant[first:last] = ~np.tril(beaten, -1).any(axis=1)
    return order[dominant]


def _starts(keys: np.ndarray) -> np.ndarray:
    """Return the start of every run of equal keys; ``[keys, plans]`` are sorted."""
    return np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))


def _falling(keys: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return True for values less than all earlier values with the same keys."""
    starts = _starts(keys)
    run = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(value)))
    rank = np.unique(value, return_inverse=True)[1] - run * (len(value) + 1)
    least = np.minimum.accumulate(rank)
    return np.append(True, rank[1:] < least[:-1])


def merge(group: np.ndarray, values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbors of sorted groups until no group has more than ``width``.

    Returns:
        Index of the first plan of each, ``[plans]``, and the least of their values, ``[numbers, plans]``.
    """
    starts = _starts(group[None])
    sizes = np.diff(starts, append=len(group))
    place = np.arange(len(group)) - np.repeat(starts, sizes)
    part = place * width // np.repeat(np.maximum(sizes, width), sizes)
    leaders = _starts(np.stack([group, part]))
    return leaders, np.minimum.reduceat(values, leaders, axis=1)


def _counts(steps: list[tuple[np.ndarray, np.ndarray]], index: int) -> list[int]:
    """Return the layers of each stage of the plan at ``index`` of the last step."""
    counts = []
    for parent, count in reversed(steps):
        counts.append(int(count[index]) + 1)
        index = int(parent[index])
    return counts[::-1]
