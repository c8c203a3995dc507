"""Local search over splits for a zero-bubble schedule, guided by what each stage alone asks of a step.

A layer is moved between two stages, or a stage changes for how many micro-batches under way its layers are recomputed. Neighbours
of which some stage alone asks for more than the best step are dismissed; the others are timed by the few rules that suit the
split the descent began with, and scheduled with all care where that promises something.

The search starts from splits that ask for little more than the bound, and still go well.

Splits by profile leave their stages room for numbers of micro-batches that are said beforehand. The others need none: of the runs
of layers that a step below a limit can have (``joint_bound.py``) two kinds of splits are made, that with the shortest way to the
last stage and back, and for several periods that whose micro-batches, one in each period, come back soonest where passes and
weight gradients of a stage do not overlap. With such a period T a backward pass starts on a stage V after the forward pass, the
latter at 0 in the period; so V mod T leaves room for the forward pass before it, for itself, and for the weight gradient behind
it or before it. From the forward pass to the weight gradient it takes no more periods than memory holds micro-batches. As waiting
is allowed, the least V of the stages behind is best, and a dynamic program from the last stage on finds the least of all splits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.deadline import check
from mindllm.planning.plan import Evaluation, Plan, plan_costs, quickest, try_plan, zero_bubble_costs
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.stage_choice import one_shift, shifts
from mindllm.planning.zero_bubble.joint_bound import allowed
from mindllm.planning.zero_bubble.lone_stages import LoneStages, Options
from mindllm.planning.zero_bubble.operation_order import whole_step
from mindllm.planning.zero_bubble.schedule_search import Rule, quick_time, ranked_rules

LIMITS = 6  # between the bound and the best step
PERIODS = (0.9, 0.92, 0.94, 0.96, 0.98, 1.0, 1.03)  # of the limit's share for a micro-batch
ABOVE = 1e-3  # the first limit above the bound
EXACT = 1e-7  # of a period, by which times may overlap
SLACK = (0.0, 0.03, 0.08, 0.2)  # beyond the bound: splits that keep to it and compute least are tried

Onward = Callable[[Options, np.ndarray], np.ndarray]
"""From the least values behind each run of layers, ``[options]``, to those with the run; infinite where it is not possible."""
RULES = 3
STARTS = 2  # of the splits near the bound
TRIED = 24  # neighbours that are timed before the search starts again from another split
BETTER = 1e-5
PROMISING = 1e-3  # by which the quick time may be above the best one's and still be scheduled with all care
SHAKES = 4


def near_splits(stages: LoneStages, bound: float, best: float, deadline: float) -> Iterator[Plan]:
    """Plans between ``bound`` and the step of the ``best`` plan.

    Raises:
        OutOfTime: at ``deadline``.
    """
    problem = stages.problem
    for limit in np.linspace(min(bound * (1 + ABOVE), best), best, LIMITS):
        options = allowed(problem, stages.options, limit, deadline)
        periods = [share * limit / problem.micro_batches for share in PERIODS]
        for onward in (_shortest(problem), *(_periodic(problem, period) for period in periods)):
            check(deadline)
            chosen = _least(problem, options, onward)
            if chosen is not None:
                yield stages.plan_of(options, chosen)


def splits_by_profile(stages: LoneStages, bound: float) -> Iterator[Plan]:
    """Splits that ask for little more than the bound, with several profiles of micro-batches under way."""
    behind = stages.stages - np.arange(stages.stages)
    profiles = [np.ones_like(behind), behind, np.minimum(2 * behind - 1, stages.stages), 2 * behind - 1]
    plans = (stages.plan(bound * (1 + slack), profile) for slack, profile in itertools.product(SLACK, profiles))
    yield from dict.fromkeys(plan for plan in plans if plan is not None)


def _least(problem: Problem, options: Sequence[Options], onward: Onward) -> list[int] | None:
    """The run of layers of each stage with the least value of all; None where none is possible."""
    least = np.append(np.full(problem.layer_count, np.inf), -2 * problem.point_to_point)
    choices = []
    for mine in reversed(options):
        values = onward(mine, least[mine.end])
        falling = np.argsort(-values, kind="stable")
        least, choice = np.full(problem.layer_count + 1, np.inf), np.zeros(problem.layer_count + 1, int)
        least[mine.start[falling]], choice[mine.start[falling]] = values[falling], falling
        choices.append(choice)
    if not np.isfinite(least[0]):
        return None
    chosen, at = [], 0
    for mine, choice in zip(options, reversed(choices), strict=True):
        chosen.append(int(choice[at]))
        at = mine.end[chosen[-1]]
    return chosen


def _shortest(problem: Problem) -> Onward:
    """The way to the last stage and back."""
    return lambda mine, behind: 2 * problem.point_to_point + behind + mine.trip


def _periodic(problem: Problem, period: float) -> Onward:
    """The same with the waits that a period asks for."""
    spare = EXACT * period

    def onward(mine: Options, behind: np.ndarray) -> np.ndarray:
        forward, weight, backward = mine.forward, mine.weight, mine.backward - mine.weight
        ready = np.where(np.isfinite(behind), forward + behind + 2 * problem.point_to_point, 0.0)
        before = np.floor(ready / period + EXACT)  # whole periods

        def start(first: np.ndarray, last: np.ndarray) -> np.ndarray:
            """The first moment that falls between two of the period."""
            late = np.where(ready - before * period <= last + spare, before, before + 1) * period + first
            return np.where(first <= last + spare, np.maximum(ready, late), np.inf)

        behind_it = start(forward, period - backward - weight)
        behind_it[behind_it + backward + weight > mine.under_way * period + spare] = np.inf
        before_it = start(forward + weight, period - backward)
        before_it[~(np.floor(before_it / period + EXACT) + 2 <= mine.under_way)] = np.inf
        return np.where(np.isfinite(behind), np.minimum(behind_it, before_it) + backward, np.inf)

    return onward


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
