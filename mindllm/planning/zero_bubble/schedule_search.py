"""Zero-bubble schedules: the backward pass in two parts, of which the weights' gradient may wait (Qi et al. 2024, 2401.10241).

A stage always does what is ready, in an order of preference: forward passes until enough are under way, then backward passes,
then weight gradients in what would be a wait. How many are enough, how much of a wait suffices for a gradient, and when forward
passes start, is tried out, first on a grid, then by chance; then single operations are moved (``operation_order.py``). Memory
decides with them: ``zb1p`` keeps within the activations of 1F1B's first stage on all stages, ``zb2p`` within twice that, ``zb``
within the limit.

Rules choose the operations: when a forward pass is due, what may wait for a gradient. Where memory holds fewer micro-batches
than there are stages behind, a pass that waits for one in the other direction makes its micro-batch hold its place for longer,
and so all others. Passes of all micro-batches meet without waiting where the first stage starts them on a beat that is as long
as a forward and a backward pass: every stage then has room for one of each in a beat, moved by one stage they still fall into
each other's gaps, and weight gradients take the places that are left free. At which beats micro-batches start is spread evenly
over the time that a micro-batch takes the slowest stage, or that memory asks for.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mindllm.deadline import OutOfTime, check
from mindllm.planning.zero_bubble.operation_order import (
    Judge,
    Kinds,
    StageCosts,
    improved,
    longest_stage,
    walk,
    with_micro_batches,
)
from mindllm.planning.zero_bubble.through_time import ThroughTime
from mindllm.schedules.operations import BACKWARD, FORWARD, WEIGHT
from mindllm.schedules.orders import Orders

DEPTHS = (0.0, 0.5, 0.8, 1.0, 1.03, 1.06, 1.25, 1.5)
"""Forward passes under way beyond 1F1B's, as a share of the stages behind."""
PATIENCE = (0.0, 0.15, 0.3, 0.7, 1.0)
"""The part of a weight gradient that may make the next operation late."""
BEATS = (1.0, 1.05)
"""Times the longest forward and backward pass that meet."""
PACES = (1.0, 1.04, 1.07, 1.1, 1.15)
"""Times the least time between two micro-batches."""
ON_BEATS = PATIENCE[:3]  # where weight gradients fill what beats leave free
CHANGES = (0.95, 0.98, 0.99, 1.01, 1.02, 1.05)
EVEN = 1e-9  # a changed rule as good as the best one so far takes its place
EFFORT = 300_000
MOVING = 5  # times as many operations are timed for moves: that is so much quicker than to schedule them


@dataclass(frozen=True)
class Rule:
    """What a stage does first.

    Attributes:
        wanted: forward passes under way that are enough, ``[stages]``.
        patience: the share of a weight gradient that may make others late, ``[stages]``.
        beat: between forward passes of the first stage, times the longest two passes that meet; 0: as soon as possible.
        pace: between micro-batches on the average, times the least; only with a beat.
    """

    wanted: np.ndarray
    patience: np.ndarray
    beat: float = 0.0
    pace: float = 1.0

    def starts(self, costs: StageCosts, micro_batches: int) -> np.ndarray:
        """The moments before which the first stage starts no forward pass, ``[micro_batches]``."""
        number = np.arange(micro_batches)
        beat = self.beat * longest_pair(costs)
        if not beat:
            return np.zeros(micro_batches)
        return beat * np.floor(number * max(1.0, self.pace * least_pace(costs, micro_batches) / beat) + 1e-9)

    def changed(self, random: np.random.Generator) -> Rule:
        """The rule with a stretch of stages changed, or its beat or pace."""
        if self.beat and random.random() < 0.5:
            name = random.choice(("beat", "pace"))
            return replace(self, **{name: getattr(self, name) * random.choice(CHANGES)})
        first = int(random.integers(len(self.wanted)))
        stretch = slice(first, first + int(random.integers(1, len(self.wanted) + 1)))
        wanted, patience = self.wanted.copy(), self.patience.copy()
        if random.random() < 0.5:
            wanted[stretch] = np.maximum(1, wanted[stretch] + random.choice((-1, 1)))
        else:
            patience[stretch] = random.choice(PATIENCE)
        return replace(self, wanted=wanted, patience=patience)


def grid(costs: StageCosts, micro_batches: int) -> Iterator[Rule]:
    """The same for all stages, by depth and patience; where memory holds less than 1F1B asks for by beat and pace, too."""
    stages = len(costs.forward)
    behind = stages - 1 - np.arange(stages)
    for depth, patience in itertools.product(DEPTHS, PATIENCE):
        yield Rule(behind + 1 + np.rint(depth * behind).astype(int), np.full(stages, patience))
    if (costs.room < np.minimum(behind + 1, micro_batches)).any():
        for beat, pace, patience in itertools.product(BEATS, PACES, ON_BEATS):
            yield Rule(np.full(stages, micro_batches), np.full(stages, patience), beat, pace)


def longest_pair(costs: StageCosts) -> float:
    """A forward and a backward pass of one stage, or of a stage and the next with the tensors between them."""
    apart = costs.forward[:-1] + costs.backward[1:] + 2 * costs.delay
    return float(max((costs.forward + costs.backward).max(), apart.max(initial=0.0)))


def least_pace(costs: StageCosts, micro_batches: int) -> float:
    """The time between micro-batches, by the work of the slowest stage and by what memory holds on the way behind each stage."""
    passes = costs.forward + costs.backward
    trip = np.cumsum((passes + 2 * costs.delay)[::-1])[::-1] - 2 * costs.delay
    held = (trip + costs.weight) / np.clip(costs.room, 1, micro_batches)
    return float(max((passes + costs.weight).max(), held.max()))


def best_orders(
    costs: StageCosts,
    micro_batches: int,
    effort: int = EFFORT,
    judge: Judge = longest_stage,
    deadline: float = math.inf,
) -> Orders:
    """The schedule found whose slowest stage is quickest in the eyes of ``judge``.

    The plain schedule first, then the grid, then small random changes of the best rule as long as about ``effort`` operations
    have been scheduled, then moves of single operations. After ``deadline`` the best so far is taken.

    Raises:
        ValueError: a stage cannot hold one micro-batch.
    """
    best = plain(costs, micro_batches)
    with contextlib.suppress(OutOfTime):
        best = _by_rules(costs, micro_batches, effort, judge, best, deadline)
        best = improved(costs, best, judge, MOVING * effort, deadline)
    return with_micro_batches(best)


def plain(costs: StageCosts, micro_batches: int) -> list[Kinds]:
    """1F1B with each weight gradient behind its backward pass, and no more micro-batches under way than memory holds.

    Raises:
        ValueError: a stage cannot hold one micro-batch.
    """
    stages = len(costs.forward)
    wanted = np.minimum(stages - np.arange(stages), micro_batches)
    under_way = np.minimum.accumulate(np.minimum(wanted, costs.room)).astype(int)
    if (under_way < 1).any():
        raise ValueError("a stage cannot hold one micro-batch")
    turn = [BACKWARD, WEIGHT, FORWARD]
    return [[FORWARD] * n + turn * (micro_batches - n) + turn[:2] * n for n in under_way.tolist()]


def _by_rules(
    costs: StageCosts, micro_batches: int, effort: int, judge: Judge, best: list[Kinds], deadline: float
) -> list[Kinds]:
    """The best schedule of the grid, changes of the best rules with and without a beat, and ``best``."""
    check(deadline)
    line = walk(costs, best)
    assert line is not None
    least, leaders = max(line.times(judge)), dict[bool, tuple[float, Rule]]()
    random = np.random.default_rng(0), np.random.default_rng(1)

    def tries() -> Iterator[tuple[Rule, float]]:
        yield from zip(grid(costs, micro_batches), itertools.repeat(0.0))
        for _ in range(effort // (3 * len(costs.forward) * micro_batches)):
            yield from [(leader.changed(random[on_beats]), EVEN) for on_beats, (_, leader) in leaders.items()]

    with contextlib.suppress(OutOfTime):
        for rule, even in tries():
            for time, kinds in _tried(costs, micro_batches, rule, judge, deadline):
                if time < leaders.get(rule.beat > 0, (math.inf, rule))[0] * (1 + even):
                    leaders[rule.beat > 0] = time, rule
                if time < least:
                    least, best = time, kinds
    return best


def ranked_rules(costs: StageCosts, micro_batches: int, judge: Judge, deadline: float) -> list[Rule]:
    """Every third rule of the grid, as far as memory allows them, the quickest first."""
    some = itertools.islice(grid(costs, micro_batches), 0, None, 3)
    tried = [(_tried(costs, micro_batches, rule, judge, deadline), rule) for rule in some]
    return [rule for found, rule in sorted((each for each in tried if each[0]), key=lambda each: each[0][0][0])]


def quick_time(
    costs: StageCosts, micro_batches: int, rules: Iterable[Rule], judge: Judge, deadline: float = math.inf
) -> float:
    """The least time of a few rules; infinite where memory allows none."""
    found = [tried for rule in rules for tried in _tried(costs, micro_batches, rule, judge, deadline)]
    return min((time for time, _ in found), default=math.inf)


def _tried(
    costs: StageCosts, micro_batches: int, rule: Rule, judge: Judge, deadline: float
) -> list[tuple[float, list[Kinds]]]:
    """The time and the schedule of a rule; nothing where memory stops it."""
    kinds = _Greedy(costs, micro_batches, rule).run(deadline)
    line = walk(costs, kinds) if kinds is not None else None
    return [(max(line.times(judge)), kinds)] if kinds is not None and line is not None else []


class _Greedy(ThroughTime):
    """One pass through time. Stages are asked in the order of the moments at which they are free or something arrives.

    All numbers are kept in lists: single elements of arrays take three times as long.
    """

    def __init__(self, costs: StageCosts, micro_batches: int, rule: Rule) -> None:
        stages = len(costs.forward)
        self.micro, self.delay, self.last = micro_batches, costs.delay, stages - 1
        self.wanted: list[int] = rule.wanted.tolist()
        self.early: list[float] = (
            (1 - rule.patience) * costs.weight
        ).tolist()  # of a weight gradient, before others come
        self.times: list[list[float]] = [costs.forward.tolist(), costs.backward.tolist(), costs.weight.tolist()]
        self.change: list[list[float]] = [
            costs.held.tolist(), (costs.kept - costs.held).tolist(), (-costs.kept).tolist()
        ]  # fmt: skip
        self.most: list[float] = (costs.limit * (1 + 1e-12) - costs.held).tolist()  # before a forward pass
        self.kinds: list[Kinds] = [[] for _ in range(stages)]
        self.done = [[0, 0, 0] for _ in range(stages)]
        self.memory = [0.0] * stages
        self.free = [0.0] * stages
        self.arrival = [[[math.inf] * micro_batches for _ in range(2)] for _ in range(stages)]
        self.arrival[0][FORWARD] = rule.starts(costs, micro_batches).tolist()
        self.events = [(0.0, stage) for stage in range(stages)]

    def _ask(self, stage: int, now: float) -> None:
        forward, backward, weight = self.done[stage]
        arrival = self.arrival[stage]
        room = self.memory[stage] <= self.most[stage]
        next_forward = arrival[FORWARD][forward] if forward < self.micro and room else math.inf
        next_backward = arrival[BACKWARD][backward] if backward < forward else math.inf
        if forward - backward >= self.wanted[stage]:
            next_forward = math.inf
        if next_forward <= now:
            self._do(stage, FORWARD, forward, now)
        elif next_backward <= now:
            self._do(stage, BACKWARD, backward, now)
        else:
            nearest = min(next_backward, next_forward)
            if weight < backward and now + self.early[stage] <= nearest:
                self._do(stage, WEIGHT, weight, now)
            elif nearest < math.inf:
                heapq.heappush(self.events, (nearest, stage))

    def _do(self, stage: int, what: int, micro: int, now: float) -> None:
        end = now + self.times[what][stage]
        self.kinds[stage].append(what)
        self.done[stage][what] += 1
        self.free[stage] = end
        self.memory[stage] += self.change[what][stage]
        heapq.heappush(self.events, (end, stage))
        if what == FORWARD and stage == self.last:
            self.arrival[stage][BACKWARD][micro] = end
        elif what == FORWARD:
            self._send(stage + 1, FORWARD, micro, end + self.delay)
        elif what == BACKWARD and stage:
            self._send(stage - 1, BACKWARD, micro, end + self.delay)

    def _send(self, stage: int, what: int, micro: int, when: float) -> None:
        self.arrival[stage][what][micro] = when
        heapq.heappush(self.events, (max(when, self.free[stage]), stage))
