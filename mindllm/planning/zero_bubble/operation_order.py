"""Changes of the order of operations on single stages, along the longest chain, for times and memory that are given.

A schedule is a list of kinds of operations for every stage; micro-batches go in their order. It is timed in one walk over the
stages, which also tells what each operation waited for. Only an operation on the longest chain can shorten it, so one of those or
a neighbour is moved by some places. A change for the worse is taken at times, more rarely towards the end (simulated annealing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from mindllm.deadline import check, passed
from mindllm.schedules.operations import BACKWARD, FORWARD, INPUT
from mindllm.schedules.orders import Orders

Kinds = list[int]  # of the operations of a stage
Needs = Sequence[tuple[int, int] | None]  # stage and kind of operation, by kind
Judge = Callable[[float, float], float]  # the time of a stage, from its first start and its last end
NEIGHBOURS = (-2, -1, 0, 0, 0, 0, 0, 1, 2)  # places beside the longest chain
MOVES = (-4, -2, -1, 1, 2, 4)
WARMTH = 0.02  # first worsening that is taken as a rule, as a share of a forward pass
OTHERS = 0.01  # weight of the other stages beside that of the slowest


def longest_stage(start: float, end: float) -> float:
    """From the first start to the last end of a stage: its share of the step when steps follow each other."""
    return end - start


def whole_step(start: float, end: float) -> float:
    """From the start of the step to the last end of a stage."""
    return end


class Operations(Protocol):
    """What the walk asks of costs: kinds of operations are numbers, and a stage does each kind in the order of micro-batches."""

    @property
    def forward(self) -> np.ndarray:
        """Times of forward passes."""

    @property
    def limit(self) -> np.ndarray:
        """MB that activations may take, ``[stages]``."""

    @property
    def delay(self) -> float:
        """Of a tensor between stages."""

    @property
    def durations(self) -> list[list[float]]:
        """Time by kind of operation and stage."""

    @property
    def changes(self) -> list[list[float]]:
        """MB that an operation takes, by kind and stage."""

    def needed(self, stage: int) -> Needs:
        """Stage and kind of what each kind of operation needs of the same micro-batch."""


@dataclass(frozen=True)
class StageCosts:
    """What one micro-batch costs on each stage, ``[stages]`` each.

    Attributes:
        forward, backward, weight: times; ``backward`` without the weight gradient.
        held: MB from the forward pass on.
        kept: MB of it that wait for the weight gradient; the rest is free after the backward pass.
        limit: MB that activations may take.
        delay: of a tensor between stages.
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    held: np.ndarray
    kept: np.ndarray
    limit: np.ndarray
    delay: float = 0.0

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @cached_property
    def durations(self) -> list[list[float]]:
        """Time by kind of operation and stage."""
        return [times.tolist() for times in (self.forward, self.backward, self.weight)]

    @cached_property
    def changes(self) -> list[list[float]]:
        """MB that an operation takes, less than nothing where it frees some, by kind and stage."""
        return [self.held.tolist(), (self.kept - self.held).tolist(), (-self.kept).tolist()]

    def needed(self, stage: int) -> Needs:
        """Stage and kind of what each kind of operation needs of the same micro-batch."""
        return needed(stage, self.stages)

    @property
    def room(self) -> np.ndarray:
        """Micro-batches whose activations a stage holds at once, ``[stages]``; infinite where they take no memory."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.floor(np.where(self.held > 0, self.limit * (1 + 1e-12) / self.held, np.inf))


@dataclass(frozen=True)
class Walk:
    """A timed schedule: first start and last end of each stage, and what each operation waited for (stage and place)."""

    starts: list[float]
    ends: list[float]
    waited: list[list[tuple[int, int] | None]]

    def times(self, judge: Judge) -> list[float]:
        """What ``judge`` says of each stage."""
        return [judge(start, end) for start, end in zip(self.starts, self.ends, strict=True)]

    def chain(self, stage: int) -> list[tuple[int, int]]:
        """The longest chain that ends with the last operation of a stage."""
        found: list[tuple[int, int]] = []
        at: tuple[int, int] | None = (stage, len(self.waited[stage]) - 1)
        while at is not None:
            found.append(at)
            at = self.waited[at[0]][at[1]]
        return found


def walk(costs: Operations, kinds: Sequence[Kinds]) -> Walk | None:
    """Times a schedule; None when its operations wait for each other."""
    stages = range(len(kinds))
    needs, duration = [costs.needed(stage) for stage in stages], costs.durations
    done: list[list[list[float]]] = [[[] for _ in duration] for _ in stages]  # ends, by stage and kind
    where: list[list[list[int]]] = [[[] for _ in duration] for _ in stages]  # and their places
    waited: list[list[tuple[int, int] | None]] = [[] for _ in stages]
    starts, ends = [0.0 for _ in stages], [0.0 for _ in stages]
    before = -1
    while before < (before := sum(map(len, waited))):
        for stage in stages:
            now = ends[stage]
            for place in range(len(waited[stage]), len(kinds[stage])):
                kind = kinds[stage][place]
                need, last = needs[stage][kind], (stage, place - 1) if place else None
                if need is not None:
                    source, what = need
                    micro = len(done[stage][kind])
                    if micro >= len(done[source][what]):
                        break
                    ready = done[source][what][micro] + (costs.delay if source != stage else 0.0)
                    if ready > now or last is None:
                        now, last = ready, (source, where[source][what][micro])
                if not place:
                    starts[stage] = now
                now += duration[kind][stage]
                waited[stage].append(last)
                where[stage][kind].append(place)
                done[stage][kind].append(now)
            ends[stage] = now
    return Walk(starts, ends, waited) if before == sum(map(len, kinds)) else None


def needed(stage: int, stages: int) -> tuple[tuple[int, int] | None, tuple[int, int], tuple[int, int]]:
    """Stage and kind of what a forward, a backward and a weight operation need of the same micro-batch."""
    forward = (stage - 1, FORWARD) if stage else None
    backward = (stage + 1, BACKWARD) if stage < stages - 1 else (stage, FORWARD)
    return forward, backward, (stage, BACKWARD)


def fits(costs: Operations, stage: int, kinds: Kinds) -> bool:
    """Whether the activations of a stage stay within its limit."""
    change = [by_stage[stage] for by_stage in costs.changes]
    held = most = 0.0
    for kind in kinds:
        held += change[kind]
        most = max(most, held)
    return most <= costs.limit[stage] * (1 + 1e-12)


def improved(
    costs: Operations, kinds: Sequence[Kinds], judge: Judge, effort: int, deadline: float = math.inf
) -> list[Kinds]:
    """The best schedule met until ``deadline``, of about ``effort`` operations timed; the given one where none is better.

    Raises:
        OutOfTime: it is later already.
    """
    check(deadline)
    current = [list(mine) for mine in kinds]
    best, size = list(current), sum(map(len, kinds))
    line = walk(costs, current)
    if line is None:
        raise ValueError("the operations of this schedule wait for each other")
    least = max(line.times(judge))
    random, tries = np.random.default_rng(0), effort // size
    for number in range(tries):
        if passed(deadline):
            break
        warmth = WARMTH * float(costs.forward.mean()) * (1 - number / tries)
        found = _changed(costs, current, line, judge, random)
        if found is None:
            continue
        stage, mine = found
        tried = [*current[:stage], mine, *current[stage + 1 :]]
        after = walk(costs, tried)
        if after is None:
            continue
        worse = _weighed(after.times(judge)) - _weighed(line.times(judge))
        if worse <= 0 or (warmth > 0 and random.random() < math.exp(-worse / warmth)):
            current, line = tried, after
            if max(line.times(judge)) < least:
                best, least = current, max(line.times(judge))
    return best


def _weighed(times: list[float]) -> float:
    """The longest time, and a little of the next: where several stages are slowest, each step towards fewer counts."""
    return max(times) + OTHERS * sum(sorted(times)[-3:])


def _changed(
    costs: Operations, kinds: list[Kinds], line: Walk, judge: Judge, random: np.random.Generator
) -> tuple[int, Kinds] | None:
    """A stage with an operation of its longest chain, or one beside it, moved; None where that changes or fits nothing."""
    times = line.times(judge)
    chain = line.chain(times.index(max(times)))
    stage, place = chain[random.integers(len(chain))]
    size = len(kinds[stage])
    old = min(max(place + NEIGHBOURS[random.integers(len(NEIGHBOURS))], 0), size - 1)
    new = min(max(old + MOVES[random.integers(len(MOVES))], 0), size - 1)
    mine = list(kinds[stage])
    mine.insert(new, mine.pop(old))
    return (stage, mine) if mine != kinds[stage] and fits(costs, stage, mine) else None


def with_micro_batches(kinds: Sequence[Kinds]) -> Orders:
    """The operations of every stage, micro-batches of each kind in their order; backward passes have no gradients of weights."""
    orders = []
    for mine in kinds:
        count = [0, 0, 0]
        order = []
        for kind in mine:
            order.append((INPUT if kind == BACKWARD else kind, 0, count[kind]))
            count[kind] += 1
        orders.append(tuple(order))
    return Orders(orders)
