"""Plans of a V within a memory limit: splits and recomputation that leave room for micro-batches, each with an order of its own.

What a stage recomputes and how many micro-batches it may have under way share its memory, so a split comes with a level for each
stage: the micro-batches that its recomputation must leave room for, from one to those of ZB-V. Splits are judged in three ways,
each slower than the one before: by the bound of their orders (``folded_bound.py``), by the best repeated block, and by the order
that ``evaluate`` makes. Layers are moved and levels changed where that promises something; the best plan's order is then sought
with all care (``folded_orders.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.deadline import OutOfTime, check, now
from mindllm.planning.plan import (
    Evaluation,
    Plan,
    even_counts,
    folded_costs,
    orders_of,
    plan_costs,
    quickest,
    try_plan,
    with_orders,
)
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice, one_shift, shifts
from mindllm.planning.zero_bubble.folded_bound import folded_bound
from mindllm.planning.zero_bubble.folded_orders import folded_orders, quick_time
from mindllm.planning.zero_bubble.folded_split_bound import folded_split_bound

LEVELS = (0.0, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1.0)
"""Micro-batches under way that recomputation leaves room for, times the stages: about V-min, V-half and so on to ZB-V."""
EVEN = 2  # even splits that are judged with all care
NEIGHBOURS = 96  # moved layers that are judged beside a split
TRIED = 12  # of them by a repeated block
PROMISING = 3e-3  # by which a repeated block may be above the best step and still get an order of its own
PROVEN = 1e-4  # a gap that ends the work
SEARCH = 0.6  # of the time; the rest is for the order of the best plan
SHAKES = 3


def room_choices(problem: Problem, mixes: Mixes) -> list[StageChoice]:
    """What stages recompute at each level, rising."""
    most = problem.micro_batches
    found = []
    for level in sorted({min(float(most), max(1.0, share * problem.stages)) for share in LEVELS}):
        choice = StageChoice(problem, mixes, orders_of(problem))
        if level > 1:
            choice.alive = ((np.full((1, problem.chunks), level),) * problem.chunks,) * problem.stages
        found.append(choice)
    return found


def even_plans(problem: Problem) -> Iterator[Plan]:
    """Even splits with the levels that suit them best, by repeated blocks."""
    search = _Splits(problem, Mixes(problem), math.inf)
    splits = [
        _Split(counts, (level,) * problem.stages)
        for counts in even_counts(problem)
        for level in range(len(search.choices))
    ]
    times = {split: search.block_time(split) for split in splits if math.isfinite(search.asks(split))}
    for split in sorted(times, key=times.__getitem__)[:EVEN]:
        yield search.plan(split)


def solve_folded(
    problem: Problem, even: Evaluation | None, deadline: float, first: float
) -> tuple[Evaluation | None, float]:
    """The best of the plans tried, None where none fits, and a lower bound, infinite when no plan exists.

    ``first`` is the deadline of a first plan where the ``even`` split is none.
    """
    best, bound = even, 0.0
    splits = _Splits(problem, Mixes(problem, first), first)
    with contextlib.suppress(OutOfTime):
        if best is None:
            lightest = lightest_split(problem, first)
            if lightest.missing_mb > 0:
                return None, math.inf
            best = _lightest(splits, lightest.counts, first)
        bound = folded_split_bound(problem, splits.mixes, best.line.makespan if best else math.inf, deadline)
        if not math.isfinite(bound):
            bound = best.line.makespan if best else 0.0
    if best is None:
        return None, bound
    splits.mixes.deadline = splits.deadline = now() + SEARCH * (deadline - now())
    search = _Search(splits, best)
    with contextlib.suppress(OutOfTime):
        search.run(bound * (1 + PROVEN))
    best = search.best
    if best.line.makespan > bound * (1 + PROVEN):
        best = _with_care(best, deadline)
    return best, bound


def _lightest(splits: _Splits, counts: np.ndarray, deadline: float) -> Evaluation | None:
    """A first plan, of the split that needs least memory."""
    split = _Split(tuple(counts.tolist()), (0,) * splits.problem.stages)
    return try_plan(splits.problem, splits.plan(split), deadline) if math.isfinite(splits.asks(split)) else None


def _with_care(best: Evaluation, deadline: float) -> Evaluation:
    """The same plan with the best order that is found until ``deadline``."""
    problem = best.problem
    orders = folded_orders(folded_costs(problem, best.costs), problem.micro_batches, deadline=deadline)
    return quickest(best, with_orders(problem, best.plan, best.costs, orders)) or best


@dataclass(frozen=True)
class _Split:
    """Layers of each place, ``[places]``, and the level of each stage, ``[stages]``."""

    counts: tuple[int, ...]
    levels: tuple[int, ...]


class _Splits:
    """Plans of splits, and what is thought of them before they have an order."""

    def __init__(self, problem: Problem, mixes: Mixes, deadline: float) -> None:
        self.problem, self.mixes, self.deadline = problem, mixes, deadline
        self.choices = room_choices(problem, mixes)
        self._asks: dict[_Split, float] = {}
        self._blocks: dict[_Split, float] = {}

    def plan(self, split: _Split) -> Plan:
        """The plan of a split.

        Raises:
            ValueError: a stage cannot hold its layers at its level.
        """
        counts = np.array(split.counts)
        mixes = [self.choices[level].mixes_of(counts, stage) for stage, level in enumerate(split.levels)]
        return self.choices[0].plan_of(counts, mixes)

    def asks(self, split: _Split) -> float:
        """The bound of all its orders; infinite where it does not fit."""
        if split not in self._asks:
            check(self.deadline)
            try:
                costs = folded_costs(self.problem, plan_costs(self.problem, self.plan(split)))
                self._asks[split] = folded_bound(costs, self.problem.micro_batches)
            except ValueError:
                self._asks[split] = math.inf
        return self._asks[split]

    def block_time(self, split: _Split) -> float:
        """The step of its best repeated block."""
        if split not in self._blocks:
            costs = folded_costs(self.problem, plan_costs(self.problem, self.plan(split)))
            self._blocks[split] = quick_time(costs, self.problem.micro_batches, self.deadline)
        return self._blocks[split]


class _Search:
    """Keeps the ``best`` plan it has seen."""

    def __init__(self, splits: _Splits, best: Evaluation) -> None:
        self.splits, self.problem, self.best = splits, splits.problem, best
        self.random = np.random.default_rng(0)
        self.judged = {best.plan}
        self.leader: _Split | None = None

    def run(self, target: float) -> None:
        """Searches until the best step is ``target``.

        Raises:
            OutOfTime: at the deadline.
        """
        starts = [
            _Split(counts, (level,) * self.problem.stages)
            for level in reversed(range(len(self.splits.choices)))
            for counts in dict.fromkeys((self.best.plan.counts, *even_counts(self.problem)))
        ]
        starts = [self._least_asking(start) for start in starts if math.isfinite(self.splits.asks(start))]
        ranked = sorted(dict.fromkeys(starts), key=self.splits.asks)
        for start in itertools.chain(ranked, iter(self._shaken, None)):
            if self.best.line.makespan <= target:
                break
            if start is not None and self.splits.asks(start) < self.best.line.makespan:
                self._descend(start)
            check(self.splits.deadline)

    def _least_asking(self, split: _Split) -> _Split:
        """The split at the end of a descent by what orders ask for at least."""
        while True:
            better = min(self._neighbours(split), key=self.splits.asks, default=split)
            if not self.splits.asks(better) < self.splits.asks(split) * (1 - 1e-9):
                return split
            split = better

    def _descend(self, split: _Split) -> None:
        """Goes to quicker neighbours, by their repeated blocks, until there is none; judges those that promise something."""
        current = self._time(split)
        while True:
            near = sorted(self._neighbours(split), key=self.splits.asks)[:TRIED]
            near = [each for each in near if self.splits.asks(each) < self.best.line.makespan]
            times = [self._time(each) for each in near]
            if not times or not min(times) < current * (1 - 1e-9):
                return
            current, split = min(zip(times, near, strict=True), key=lambda each: each[0])

    def _time(self, split: _Split) -> float:
        """By its repeated block; judged where that is near the best."""
        check(self.splits.deadline)
        time = self.splits.block_time(split)
        if not time > self.best.line.makespan * (1 + PROMISING) or (math.isinf(time) and not self.leader):
            self._judge(split)
        return time

    def _judge(self, split: _Split) -> None:
        plan = self.splits.plan(split)
        if plan in self.judged:
            return
        self.judged.add(plan)
        found = try_plan(self.problem, plan, self.splits.deadline)
        if found is not None and found.line.makespan < self.best.line.makespan:
            self.best, self.leader = found, split

    def _neighbours(self, split: _Split) -> list[_Split]:
        """Splits with one layer moved, or the level of one stage or of all changed."""
        moved = shifts(np.array(split.counts), self.random)
        if len(moved) > NEIGHBOURS:
            moved = moved[np.sort(self.random.choice(len(moved), NEIGHBOURS, replace=False))]
        found = [_Split(tuple(row), split.levels) for row in moved.tolist()]
        for change in (-1, 1):
            options = [tuple(level + change for level in split.levels)]
            options += [_changed(split.levels, stage, change) for stage in range(self.problem.stages)]
            found += [
                _Split(split.counts, levels)
                for levels in options
                if min(levels) >= 0 and max(levels) < len(self.splits.choices)
            ]
        return [each for each in found if math.isfinite(self.splits.asks(each))]

    def _shaken(self) -> _Split:
        """A split some moves from the best one, or from an even one."""
        base = self.leader or _Split(self.best.plan.counts, (0,) * self.problem.stages)
        counts = np.array(base.counts)
        for _ in range(int(self.random.integers(1, SHAKES + 1))):
            counts = one_shift(counts, self.random)
        levels = list(base.levels)
        stage = int(self.random.integers(self.problem.stages))
        levels[stage] = int(self.random.integers(len(self.splits.choices)))
        return _Split(tuple(counts.tolist()), tuple(levels))


def _changed(levels: Sequence[int], stage: int, change: int) -> tuple[int, ...]:
    return (*levels[:stage], levels[stage] + change, *levels[stage + 1 :])
