"""The predicted step taken apart as profilers take a recorded one apart: kernels by shape, exchanges by kind and axis, waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from mindllm.timing.costs.exchanges import legs
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import ATTENTION, VECTOR, Exchange, Operator
from mindllm.timing.pass_times import PassTimes
from mindllm.timing.step import HOST, StepTime, TimedWork
from mindllm.timing.step_work import step_work

VECTORS: Hashable = (VECTOR,)
"""Vector operators are one group: a fused kernel of a device stands for several of the model of time, or for a part of one."""


def signature(one: Operator) -> Hashable:
    """Return what kernels that do the same work share: sizes in any order, operations, type; of attention its operations."""
    if one.kind == VECTOR:
        return VECTORS
    if one.kind == ATTENTION:
        return one.kind, round(one.flops / 1e6), one.dtype
    return one.kind, tuple(sorted(round(size) for size in one.sizes)), round(one.flops / 1e3), one.dtype


@dataclass
class Spent:
    """Seconds of a group of operators or exchanges, and where in the step they are spent.

    Attributes:
        passes: of one micro-batch, ``[2, places]``, forward and backward.
        once: on each stage once per step, ``[stages]``.
        counts: how often they run in a step, ``[stages]``.
        bytes: that a rank sends in a step, ``[stages]``.
        names: of the operators or exchanges.
    """

    passes: np.ndarray
    once: np.ndarray
    counts: np.ndarray
    bytes: np.ndarray
    names: Counter[str] = field(default_factory=Counter)

    @classmethod
    def nothing(cls, stages: int, places: int) -> Spent:
        """Return an empty group."""
        return cls(np.zeros((2, places)), np.zeros(stages), np.zeros(stages), np.zeros(stages))

    def of_stage(self, stage: int, runs: int) -> float:
        """Return the seconds of a step on one stage; ``runs``: micro-batches of a step."""
        return float(self.passes[:, stage :: len(self.once)].sum() * runs + self.once[stage])


@dataclass(frozen=True)
class Change:
    """Seconds by which a stage takes longer: of each micro-batch, ``[2, places]``, and once per step, ``[stages]``."""

    passes: np.ndarray
    once: np.ndarray


class PredictedStep:
    """A predicted step by group of operators and exchanges, and the step with changes."""

    def __init__(self, step: StepTime) -> None:
        self.step, self.timed = step, TimedWork(step_work(step.workload), step.device)
        plan, strategy = step.workload.plan, step.workload.strategy
        self.stages, self.places = plan.stages, plan.stages * plan.chunks
        self.accumulation = strategy.accumulation
        self.runs = strategy.runs
        self.operators: dict[Hashable, Spent] = defaultdict(self._nothing)
        self.exchanges: dict[tuple[str, str], Spent] = defaultdict(self._nothing)
        self._passes()
        self._ends()

    def _nothing(self) -> Spent:
        return Spent.nothing(self.stages, self.places)

    def _passes(self) -> None:
        work = self.timed.work
        for place, held in enumerate(work.places):
            for name, count in held.items():
                part = work.parts[name]
                for which, each in ((0, part.forward), (1, (*part.backward, *part.repeated))):
                    for one in each:
                        self._add(one, place % self.stages, count, (which, place))

    def _ends(self) -> None:
        for stage, update in enumerate(self.timed.work.updates):
            self._add(update.update, stage, 1)
            for seldom in update.beside:
                for one in seldom.work:
                    self._add(one, stage, seldom.times)
            for one in update.exchanges:
                self._add(one, stage, 1)
        if self.timed.work.table is not None:
            self._add(self.timed.work.table, 0, 2)  # there, and its gradient back

    def _add(self, one: Operator | Exchange, stage: int, count: float, where: tuple[int, int] | None = None) -> None:
        """Add ``count`` runs of a micro-batch in pass ``where``, or once per step."""
        runs = count * self.runs if where else count
        if isinstance(one, Operator):
            spent, seconds = self.operators[signature(one)], operator_seconds(one, self.step.device)
        else:
            group = self.timed.groups[one.axis]
            if group.size <= 1:
                return
            spent, seconds = self.exchanges[one.op, one.axis], self.timed.exchange_seconds(one)
            sent = sum(leg.bytes for leg in legs(one.op, one.bytes, group, self.step.device))
            spent.bytes[stage] += sent * runs
        spent.counts[stage] += runs
        spent.names[one.name] += 1
        if where:
            spent.passes[where] += count * seconds
        else:
            spent.once[stage] += count * seconds

    def parts(self, stage: int) -> dict[str, float]:
        """Return what a stage is predicted to spend, as a profiler adds it up."""
        step, end = self.step, self.step.ends[stage]
        passes = [*step.forward[stage :: self.stages], *step.backward[stage :: self.stages]]
        waited = self.runs * sum(sum(one.exchanged.values()) for one in passes)
        exchanged = sum(spent.of_stage(stage, self.runs) for spent in self.exchanges.values())
        free = self.runs * sum(one.compute.get(HOST, 0.0) for one in passes) + step.device.step_overhead.value
        computing = sum(spent.of_stage(stage, self.runs) for spent in self.operators.values())
        exposed = waited + end.exposed
        return {
            "computing": computing, "exposed": exposed, "hidden": exchanged - exposed, "free": free,
            "bubble": step.seconds - computing - exposed - free,
        }  # fmt: skip

    def spread(self, spent: Spent, stage: int, seconds: float) -> Change:
        """Return seconds of a stage as the group spends its own: in these passes, or once."""
        whole, mine = spent.of_stage(stage, self.runs), np.zeros_like(spent.passes)
        once = np.zeros(self.stages)
        if whole <= 0:
            once[stage] = seconds
            return Change(mine, once)
        mine[:, stage :: self.stages] = spent.passes[:, stage :: self.stages] * seconds / whole
        once[stage] = spent.once[stage] * seconds / whole
        return Change(mine, once)

    @property
    def everything(self) -> Spent:
        """What all passes take, by place: where a cause is that no group of operators stands for."""
        return replace(self._nothing(), passes=self.timed.durations)

    def seconds(self, changes: Iterator[Change] | list[Change], delay: float = 0.0) -> tuple[float, np.ndarray]:
        """Return the step with changes, and what each stage waits for others, ``[stages]``; ``delay`` is of every Send."""
        durations, once = self.timed.durations.copy(), np.zeros(self.stages)
        for change in changes:
            durations += change.passes
            once += change.once
        durations = np.maximum(durations, 0.0)
        plan, own = self.step.workload.plan, self.timed.pass_times
        forward, backward = durations.tolist()
        delay = max(0.0, own.delay + delay)
        line = PassTimes(
            plan.stages, plan.chunks, own.micro_batches, tuple(forward), tuple(backward), delay, own.schedule,
            own.weight, own.again, own.pieces,
        ).simulated()  # fmt: skip
        overhead = self.step.device.step_overhead.value  # a change may be that it is less
        ends = np.maximum(np.array([end.seconds for end in self.step.ends]) + once, -overhead)
        seconds = line.makespan * self.accumulation + float(ends.max()) + overhead
        return seconds, seconds - line.busy() * self.accumulation - ends - overhead
