"""Zero-bubble orders of two chunks in a V that keep within a memory limit (Qi et al., 2024, 2405.15362): V-min to ZB-V.

A micro-batch goes down the stages in chunk 0 and back in chunk 1, so what a stage keeps of the two adds up to the same on every
stage. How long a micro-batch is under way decides what is kept: with passes that start one after another on neighbouring stages a
third of 1F1B's activations, with a pause between them half, and so on. Such rhythms are tried, those first that keep about what
memory allows: a target time for each forward and backward pass, linear in stage and micro-batch, with one stride on the first
stages and a shorter one behind. Stages do passes in the order of their targets, backward passes that are there sooner before
them; eager ones do whatever is there. Gradients of weights take what would be a wait, or are done where memory asks for room.
Before them come orders that repeat a block (``repeated_blocks.py``), their waits filled (``filled_waits.py``). Single operations
of the best of all are then moved along the longest chain (``operation_order.py``).

MindSpore has an order of its own for a V (``schedules/zero_bubble_v.py``) and trains none of these.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindllm.deadline import OutOfTime, now
from mindllm.planning.zero_bubble.filled_waits import filled
from mindllm.planning.zero_bubble.folded_bound import folded_bound
from mindllm.planning.zero_bubble.folded_costs import B0, B1, F0, F1, W0, W1, FoldedCosts
from mindllm.planning.zero_bubble.operation_order import Judge, Kinds, fits, improved, walk, whole_step
from mindllm.planning.zero_bubble.repeated_blocks import grids, ranked
from mindllm.planning.zero_bubble.through_time import ThroughTime
from mindllm.schedules.operations import FORWARD, INPUT, WEIGHT
from mindllm.schedules.orders import Orders

STRIDES = (1.0, 2.0, 3.0, 4.0, 5.0)
"""From a stage to the next on the way down, times a third of the longest passes of a chunk; on the way back it is one."""
CUTS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Share of the stages that have the longer of two strides."""
PAUSES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
"""Between the two ways of a pass, likewise."""
NEAR = 160  # rhythms that are tried, those that keep about what memory allows
LEADERS = 8  # of which patience and pace are then changed
PATIENCE = (0.0, 0.4, 1.0)
"""The part of a gradient of weights that may make the next pass late."""
PACES = (1.0, 1.04)
"""Times the least time between micro-batches."""
BEST = 4  # orders whose operations are moved
EFFORT = 4_000_000  # operations timed for that, and as many for the waits of blocks
QUICK_EFFORT = 20_000  # for the waits of blocks where many plans are to be judged


@dataclass(frozen=True)
class Rhythm:
    """Targets of passes: strides on the way down, pauses at the turns, pace; and what stages do beside their targets.

    Attributes:
        stride: before the ``cut`` and behind it, a share of the stages.
        patience: the part of a gradient of weights that may make the next pass late.
        eager: whether stages do what is there when the next pass by its target is not.
    """

    stride: tuple[float, float]
    cut: float
    pause: tuple[float, float]
    pace: float = 1.0
    patience: float = 0.0
    eager: bool = False

    def targets(self, costs: FoldedCosts) -> np.ndarray:
        """Of the passes of the first micro-batch, ``[4, stages]``."""
        unit = float((costs.forward + costs.backward + costs.weight).max()) / 3 + costs.delay
        gaps = np.where(np.arange(costs.stages - 1) < self.cut * (costs.stages - 1), *self.stride)
        down, back = unit * np.append(0.0, gaps.cumsum()), unit * np.arange(costs.stages)[::-1]
        first, second = (unit * (1 + pause) for pause in self.pause)
        turn = down[-1] + first
        loss = turn + back[0] + unit
        again = loss + down[-1] + second
        found = np.empty((4, costs.stages))
        found[F0], found[F1], found[B1], found[B0] = down, turn + back, loss + down, again + back
        return found

    def kept(self, costs: FoldedCosts) -> float:
        """About what the fullest stage keeps, as a share of what it may."""
        targets, work = self.targets(costs), costs.backward + costs.weight
        under_way = np.stack([targets[B0] - targets[F0], targets[B1] - targets[F1]]) + work
        return float(((under_way * costs.held).sum(axis=0) / self.period(costs) / costs.limit).max())

    def period(self, costs: FoldedCosts) -> float:
        """From a micro-batch to the next."""
        work = (costs.forward + costs.backward + costs.weight).sum(axis=0)
        return self.pace * float(work.max())


def rhythms(costs: FoldedCosts) -> list[Rhythm]:
    """Those that keep about what memory allows."""
    strides = [(stride, stride, 0.0) for stride in STRIDES]
    strides += [(more, less, cut) for less, more in itertools.combinations(STRIDES, 2) for cut in CUTS]
    found = [
        Rhythm((more, less), cut, (pause, second))
        for more, less, cut in strides
        for pause, second in itertools.product(PAUSES, PAUSES)
    ]
    free = not np.isfinite(costs.limit).all()
    return sorted(found, key=lambda rhythm: 0.0 if free else abs(rhythm.kept(costs) - 1))[:NEAR]


def coarse(costs: FoldedCosts) -> list[FoldedCosts]:
    """Costs at which orders are made beside the costs themselves: equal passes fall into each other's gaps.

    All passes alike, in round multiples of gradients of weights, as they are; without delay.
    """
    shape = costs.forward.shape
    means = [float(times.mean()) for times in (costs.forward, costs.backward, costs.weight)]
    unit = min(mean for mean in means if mean > 0) if any(means) else 1.0
    found = []
    for multiples in ([1.0, 1.0, 1.0], [max(1.0, round(mean / unit)) for mean in means]):
        forward, backward, weight = (np.full(shape, multiple) for multiple in multiples)
        found.append(replace(costs, forward=forward, backward=backward, weight=weight, delay=0.0))
    return [*found, replace(costs, delay=0.0)]


def _tried(costs: FoldedCosts, micro_batches: int, judge: Judge, deadline: float) -> dict[float, list[Kinds]]:
    """Orders by their times: of all rhythms, strict and eager, then of the best with other patience and pace.

    Those met until ``deadline``.
    """
    found: dict[float, list[Kinds]] = {}

    def offer(rhythm: Rhythm, at: FoldedCosts) -> float:
        kinds = _Stages(at, micro_batches, rhythm).run(deadline)
        time = math.inf if kinds is None else _time(costs, kinds, judge)
        if kinds is not None:
            found[time] = kinds
        return time

    with contextlib.suppress(OutOfTime):
        for at in (*coarse(costs), costs):
            leaders = []
            for number, (rhythm, eager) in enumerate(itertools.product(rhythms(at), (False, True))):
                rule = replace(rhythm, eager=eager, patience=PATIENCE[eager])
                leaders.append((offer(rule, at), number, rule))
            for (_, _, rule), patience, pace in itertools.product(sorted(leaders)[:LEADERS], PATIENCE, PACES):
                offer(replace(rule, patience=patience, pace=pace), at)
    return found


def _repeated(
    costs: FoldedCosts, micro_batches: int, judge: Judge, effort: int, goal: float, deadline: float
) -> dict[float, list[Kinds]]:
    """Orders of repeated blocks by their times, their waits filled: on the grid and then with the times as they are, or at once.

    Those met with ``effort`` operations timed, or until ``deadline``, or with the first that takes no longer than ``goal``.
    """
    found: dict[float, list[Kinds]] = {}
    with contextlib.suppress(OutOfTime):
        each = (((grid, kinds) for kinds in ranked(costs, micro_batches, grid, deadline)) for grid in grids(costs))
        for grid, kinds in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*each))):
            on_grid, used = filled(grid.costs(costs), kinds, deadline)
            effort -= used
            for start in (on_grid, kinds):
                order, used = filled(costs, start, deadline, goal)
                effort -= used
                found[_time(costs, order, judge)] = order
                if min(found) <= goal or effort <= 0:
                    return found
    return found


def folded_orders(
    costs: FoldedCosts,
    micro_batches: int,
    effort: int = EFFORT,
    judge: Judge = whole_step,
    deadline: float = math.inf,
) -> Orders:
    """The quickest order found that keeps within the memory; of an order as short as its bound no shorter is sought.

    Args:
        costs: what a micro-batch costs.
        micro_batches: of a step.
        effort: operations timed for filling waits, and again for moving single operations.
        judge: the time of a stage.
        deadline: moment of ``mindllm.deadline``; what was found by then counts.

    Raises:
        ValueError: a stage cannot hold a micro-batch of both chunks.
    """
    check_room(costs)
    goal = folded_bound(costs, micro_batches) * (1 + 1e-9) if judge is whole_step else 0.0
    plain = one_by_one(costs.stages, micro_batches)
    by_time = {_time(costs, plain, judge): plain}
    quarter = (deadline - now()) / 4
    by_time |= _repeated(costs, micro_batches, judge, effort, goal, deadline - 2 * quarter)
    if min(by_time) > goal:
        tried = _tried(costs, micro_batches, judge, deadline - quarter)
        by_time |= tried | _moved(costs, by_time, judge, effort, deadline - quarter / 2)
        by_time |= _moved(costs, {_time(costs, plain, judge): plain} | tried, judge, effort, deadline)
    return orders_of_kinds(by_time[min(by_time)])


def quick_orders(
    costs: FoldedCosts, micro_batches: int, effort: int = QUICK_EFFORT, deadline: float = math.inf
) -> Orders:
    """The shortest order of repeated blocks, their waits filled with ``effort`` operations timed; a first one in any case.

    Raises:
        ValueError: a stage cannot hold a micro-batch of both chunks.
    """
    check_room(costs)
    goal = folded_bound(costs, micro_batches) * (1 + 1e-9)
    plain = one_by_one(costs.stages, micro_batches)
    by_time = {_time(costs, plain, whole_step): plain}
    by_time |= _repeated(costs, micro_batches, whole_step, effort, goal, deadline)
    return orders_of_kinds(by_time[min(by_time)])


def quick_time(costs: FoldedCosts, micro_batches: int, deadline: float = math.inf) -> float:
    """The step of the best repeated block as it is; infinite where memory has room for none.

    Raises:
        OutOfTime: ``deadline`` passed.
    """
    best = (next(ranked(costs, micro_batches, grid, deadline), None) for grid in grids(costs))
    return min((_time(costs, kinds, whole_step) for kinds in best if kinds is not None), default=math.inf)


def check_room(costs: FoldedCosts) -> None:
    """Raises ValueError where a stage cannot hold a micro-batch of both chunks."""
    if (costs.held.sum(axis=0) > costs.limit * (1 + 1e-12)).any():
        raise ValueError("a stage cannot hold one micro-batch")


def _moved(
    costs: FoldedCosts, by_time: dict[float, list[Kinds]], judge: Judge, effort: int, deadline: float
) -> dict[float, list[Kinds]]:
    """The best orders with operations moved, until ``deadline``, by their times; of the best also with waits filled before."""
    found: dict[float, list[Kinds]] = {}
    with contextlib.suppress(OutOfTime):
        best = [by_time[time] for time in sorted(by_time)[:BEST]]
        for kinds in [filled(costs, best[0], deadline)[0], *best]:
            after = improved(costs, kinds, judge, effort // len(best), deadline)
            found[_time(costs, after, judge)] = after
    return found


def one_by_one(stages: int, micro_batches: int) -> list[Kinds]:
    """A micro-batch at a time, which fits where anything does."""
    return [[F0, F1, B1, W1, B0, W0] * micro_batches for _ in range(stages)]


def _time(costs: FoldedCosts, kinds: Sequence[Kinds], judge: Judge) -> float:
    line = walk(costs, kinds)
    return math.inf if line is None else max(line.times(judge))


def keeps_within(costs: FoldedCosts, kinds: Sequence[Kinds]) -> bool:
    """Whether no stage is over its memory."""
    return all(fits(costs, stage, mine) for stage, mine in enumerate(kinds))


def orders_of_kinds(kinds: Sequence[Kinds]) -> Orders:
    """The operations of every stage, micro-batches of each kind in their order."""
    orders = []
    for mine in kinds:
        count = [0] * 6
        order = []
        for kind in mine:
            order.append(((FORWARD, INPUT, WEIGHT)[kind // 2], kind % 2, count[kind]))
            count[kind] += 1
        orders.append(tuple(order))
    return Orders(orders, v_shape=True)


class _Stages(ThroughTime):
    """One pass through time; stages are asked at the moments at which they are free or something arrives."""

    def __init__(self, costs: FoldedCosts, micro_batches: int, rhythm: Rhythm) -> None:
        stages = range(costs.stages)
        self.costs, self.micro, self.delay = costs, micro_batches, costs.delay
        self.times, self.changes, self.most = costs.durations, costs.changes, (costs.limit * (1 + 1e-12)).tolist()
        self.targets, self.period = rhythm.targets(costs).T.tolist(), rhythm.period(costs)
        self.early, self.eager = ((1 - rhythm.patience) * costs.weight).tolist(), rhythm.eager
        self.followers: list[list[list[tuple[int, int]]]] = [[[] for _ in range(6)] for _ in stages]
        for stage in stages:
            for kind, need in enumerate(costs.needed(stage)[:4]):
                if need is not None:
                    self.followers[need[0]][need[1]].append((stage, kind))
        self.kinds: list[Kinds] = [[] for _ in stages]
        self.done = [[0] * 6 for _ in stages]
        self.arrival = [[[math.inf] * micro_batches for _ in range(4)] for _ in stages]
        self.arrival[0][F0] = [0.0] * micro_batches
        self.memory, self.free = [0.0 for _ in stages], [0.0 for _ in stages]
        self.events = [(0.0, stage) for stage in stages]

    def _ask(self, stage: int, now: float) -> None:
        done, targets = self.done[stage], self.targets[stage]
        left = [(targets[kind] + done[kind] * self.period, kind) for kind in range(4) if done[kind] < self.micro]
        left.sort()
        pending = self._pending(stage)
        ready = [kind for _, kind in left if self.arrival[stage][kind][done[kind]] <= now + 1e-12]
        head = left[0][1] if left else None
        if head is not None and head in ready:
            if (
                self._has_room(stage, head)
                if self.eager
                else self.memory[stage] + self.changes[head][stage] <= self.most[stage]
            ):
                self._do(stage, head, now)
                return
            if pending is not None:
                self._do(stage, pending, now)
                return
        other = next((kind for kind in ready if kind in (B0, B1) or (self.eager and self._has_room(stage, kind))), None)
        if other is not None:
            self._do(stage, other, now)
            return
        asked = left if self.eager else left[:1]
        coming = [self.arrival[stage][kind][done[kind]] for _, kind in asked if kind not in ready]
        self._wait(stage, pending, min(coming, default=math.inf), now)

    def _has_room(self, stage: int, kind: int) -> bool:
        """Whether a forward pass out of its turn leaves room for one through chunk 1, so that no micro-batch is stuck."""
        more = self.changes[kind][stage] + (self.changes[F1][stage] if kind == F0 else 0.0)
        return self.memory[stage] + more <= self.most[stage]

    def _wait(self, stage: int, pending: int | None, coming: float, now: float) -> None:
        """Until the next pass is there, or for a gradient of weights."""
        if pending is not None and now + self.early[pending % 2][stage] <= coming:
            self._do(stage, pending, now)
        elif math.isfinite(coming) and coming > now + 1e-12:
            heapq.heappush(self.events, (coming, stage))

    def _pending(self, stage: int) -> int | None:
        """The kind of gradients of weights of which more wait."""
        done = self.done[stage]
        waiting = [kind for kind in (W1, W0) if done[kind] < done[kind - 2]]
        return max(waiting, key=lambda kind: done[kind - 2] - done[kind], default=None)

    def _do(self, stage: int, kind: int, now: float) -> None:
        end = now + self.times[kind][stage]
        micro = self.done[stage][kind]
        self.kinds[stage].append(kind)
        self.done[stage][kind] += 1
        self.free[stage] = end
        self.memory[stage] += self.changes[kind][stage]
        heapq.heappush(self.events, (end, stage))
        for there, what in self.followers[stage][kind]:
            when = end + (self.delay if there != stage else 0.0)
            self.arrival[there][what][micro] = when
            heapq.heappush(self.events, (max(when, self.free[there]), there))
