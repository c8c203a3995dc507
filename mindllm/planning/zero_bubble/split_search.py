"""Local search over splits for a zero-bubble schedule, guided by what each stage alone asks of a step.

A layer is moved between two stages, or a stage changes for how many micro-batches under way its layers are recomputed. Neighbours
of which some stage alone asks for more than the best step are dismissed; the others are timed by the few rules that suit the
split the descent began with, and scheduled with all care where that promises something.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mindllm.deadline import check
from mindllm.planning.plan import Evaluation, Plan, plan_costs, quickest, try_plan, zero_bubble_costs
from mindllm.planning.recomputation.stage_choice import one_shift, shifts
from mindllm.planning.zero_bubble.lone_stages import LoneStages
from mindllm.planning.zero_bubble.operation_order import whole_step
from mindllm.planning.zero_bubble.rules import Rule
from mindllm.planning.zero_bubble.schedule_search import quick_time, ranked_rules

RULES = 3
STARTS = 2  # of the splits near the bound
TRIED = 24  # neighbours that are timed before the search starts again from another split
BETTER = 1e-5
PROMISING = 1e-3  # by which the quick time may be above the best one's and still be scheduled with all care
SHAKES = 4


@dataclass(frozen=True)
class _Split:
    """Layers of each stage, and for which of the numbers of micro-batches under way they are recomputed, ``[stages]``."""

    counts: np.ndarray
    numbers: np.ndarray

    @property
    def key(self) -> bytes:
        return self.counts.tobytes() + self.numbers.tobytes()


class SplitSearch:
    """Keeps the ``best`` plan it has seen."""

    def __init__(self, stages: LoneStages, best: Evaluation, deadline: float) -> None:
        self.stages, self.problem, self.best, self.deadline = stages, stages.problem, best, deadline
        self.random = np.random.default_rng(0)
        self.known: dict[bytes, float] = {}
        self.rules: list[Rule] = []
        self.starts: list[_Split] = []
        self.scheduled = {best.plan}

    def begin(self, near: Iterable[Plan]) -> None:
        """Looks at plans that may be near the best one, by the rules that suit the first of them.

        The search starts from those that take least.

        Raises:
            OutOfTime: at the deadline.
        """
        splits = {split.key: split for split in map(self._split, dict.fromkeys(near))}
        if splits:
            self._learn_rules(next(iter(splits.values())))
            self.starts = sorted(splits.values(), key=self._time)[:STARTS]
            for split in self.starts:
                self._schedule(self._plan(split))

    def run(self, target: float) -> None:
        """Searches until the best step is ``target``.

        Raises:
            OutOfTime: at the deadline.
        """
        first = {split.key: split for split in (*self.starts, self._found())}
        starts = itertools.chain(first.values(), iter(self._shaken, None))
        while self.best.line.makespan > target:
            self._descend(next(starts))

    def _split(self, plan: Plan) -> _Split:
        """The split of a plan, with the room that its recomputation leaves."""
        room = zero_bubble_costs(self.problem, plan_costs(self.problem, plan)).room
        numbers = np.searchsorted(self.stages.fewest, room, side="right") - 1
        return _Split(np.array(plan.counts), np.maximum(numbers, 0))  # a plan that fits exactly may round to no room

    def _found(self) -> _Split:
        """The split of the best plan."""
        return self._split(self.best.plan)

    def _descend(self, split: _Split) -> None:
        """Goes to the first quicker neighbour until there is none among those that ask least."""
        self._learn_rules(split)
        current, better = self._time(split), True
        while better:
            better = False
            for neighbour in self._neighbours(split):
                time = self._time(neighbour)
                if time < current * (1 - BETTER):
                    split, current, better = neighbour, time, True
                    break

    def _learn_rules(self, split: _Split) -> None:
        """Rules that suit this split."""
        costs = zero_bubble_costs(self.problem, plan_costs(self.problem, self._plan(split)))
        self.rules = ranked_rules(costs, self.problem.micro_batches, whole_step, self.deadline)[:RULES]
        self.known.clear()

    def _time(self, split: _Split) -> float:
        """The step by the rules; scheduled with all care where that is near the best one."""
        check(self.deadline)
        if split.key not in self.known:
            plan = self._plan(split)
            costs = zero_bubble_costs(self.problem, plan_costs(self.problem, plan))
            time = quick_time(costs, self.problem.micro_batches, self.rules, whole_step, self.deadline)
            self.known[split.key] = time
            if time < self.best.line.makespan * (1 + PROMISING):
                self._schedule(plan)
        return self.known[split.key]

    def _schedule(self, plan: Plan) -> None:
        """With all care, if it was not yet."""
        if plan not in self.scheduled:
            self.scheduled.add(plan)
            self.best = quickest(self.best, try_plan(self.problem, plan, self.deadline)) or self.best

    def _plan(self, split: _Split) -> Plan:
        starts = split.counts.cumsum() - split.counts
        return Plan(
            tuple(
                self.stages.place(int(number), stage, int(start), int(count))
                for stage, (number, start, count) in enumerate(zip(split.numbers, starts, split.counts, strict=True))
            )
        )

    def _asked(self, counts: np.ndarray) -> np.ndarray:
        """What each stage alone asks for, ``[numbers, splits, stages]``, for layers per stage, ``[splits, stages]``."""
        steps = self.stages.steps
        starts = counts.cumsum(axis=1) - counts
        found = steps[:, np.arange(counts.shape[1]), starts, np.minimum(counts, steps.shape[3]) - 1]
        return np.where(counts <= steps.shape[3], found, np.inf)

    def _roomy(self, asked: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The recomputation that asks least and leaves each stage the room of ``numbers``, ``[splits, stages]``.

        Where there is none, the least asking. ``asked`` is as :meth:`_asked` says. What asks least alone may leave so little room
        that stages wait for each other.
        """
        enough = np.where(np.arange(len(asked))[:, None, None] >= numbers, asked, np.inf)
        return np.where(np.isfinite(enough.min(axis=0)), enough.argmin(axis=0), asked.argmin(axis=0))

    def _neighbours(self, split: _Split) -> list[_Split]:
        """Those that may be quicker than the best, the least asking first."""
        counts = np.concatenate([split.counts[None], shifts(split.counts, self.random)])
        asked = self._asked(counts)
        tight, roomy = asked.argmin(axis=0), self._roomy(asked, split.numbers)
        counts, numbers = np.concatenate([counts, counts]), np.concatenate([tight, roomy])
        asks = np.take_along_axis(np.concatenate([asked, asked], axis=1), numbers[None], axis=0)[0]
        found = [
            ((float(worst), float(total)), _Split(*both))
            for worst, total, both in zip(
                asks.max(axis=1), asks.sum(axis=1), zip(counts, numbers, strict=True), strict=True
            )
            if worst < self.best.line.makespan * (1 - BETTER)
        ]
        mine = self._asked(split.counts[None])[:, 0]
        for stage, number in enumerate(split.numbers):
            for other in {max(number - 1, 0), min(number + 1, len(mine) - 1)} - {number}:
                changed = split.numbers.copy()
                changed[stage] = other
                asks = mine[changed, np.arange(len(changed))]
                if asks.max() < self.best.line.makespan * (1 - BETTER):
                    found.append(((float(asks.max()), float(asks.sum())), _Split(split.counts, changed)))
        found.sort(key=lambda each: each[0])
        different = {neighbour.key: neighbour for _, neighbour in found}
        different.pop(split.key, None)
        return list(itertools.islice(different.values(), TRIED))

    def _shaken(self) -> _Split:
        """A split some moves from the best one that may be quicker, with room as it has."""
        numbers = self._found().numbers
        for _ in range(1000):
            check(self.deadline)
            counts = np.array(self.best.plan.counts)
            for _ in range(self.random.integers(1, SHAKES + 1)):
                counts = one_shift(counts, self.random)
            asked = self._asked(counts[None])
            if asked.min(axis=0).max() < self.best.line.makespan:
                return _Split(counts, self._roomy(asked, numbers)[0])
        return self._found()
