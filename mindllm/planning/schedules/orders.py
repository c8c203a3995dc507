"""The order of operations on every stage of a pipeline, and the levels in which they can be timed together.

1F1B: Narayanan et al. 2021 (2104.04473), section 2.2, with the interleaved form of Megatron-LM: forward passes go through the
chunks in groups of as many micro-batches as stages. Backward passes go through them in the opposite order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
Operation = tuple[int, int, int]  # what, chunk, micro-batch
Orders = tuple[tuple[Operation, ...], ...]  # of every stage


@lru_cache(maxsize=64)
def stage_orders(schedule: str, stages: int, chunks: int, micro_batches: int) -> Orders:
    """The operations of every stage in their order, of a schedule that does not depend on times."""
    groups = _groups(stages, micro_batches)
    forwards = [(FORWARD, chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
    backwards = [(BACKWARD, chunk, micro) for group in groups for chunk in reversed(range(chunks)) for micro in group]
    orders = []
    for stage in range(stages):
        warm_up = _warm_up(schedule, stage, stages, chunks, len(groups[-1]), len(forwards))
        order: list[Operation] = list(forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += [forward, backward]
        orders.append((*order, *backwards[len(forwards) - warm_up :]))
    return tuple(orders)


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Groups of ``stages`` micro-batches; what is left joins the last, for a smaller group makes stages wait in a circle."""
    ends = [*range(stages, micro_batches - stages + 1, stages), micro_batches]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _warm_up(schedule: str, stage: int, stages: int, chunks: int, group: int, total: int) -> int:
    """Forward passes of a stage before its first pair of one forward and one backward."""
    behind = stages - 1 - stage
    if schedule == "gpipe":
        return total
    if chunks > 1 and schedule == "1f1b":
        behind *= 2
    return min(total, (chunks - 1) * group + behind)


@dataclass(frozen=True)
class Timetable:
    """Operations sorted so that those of a level depend on earlier levels alone.

    Attributes:
        starts: where each level begins, and the end of the last, ``[levels + 1]``.
        same_stage: the operation before each on its stage, ``[operations]``; the number of operations where there is none.
        incoming: the operation whose result each waits for, likewise.
        remote: whether that result comes from another stage.
        what, place: the kind of operation and the place (chunk x stages + stage) of each.
        micro: micro-batch of each.
    """

    stages: int
    chunks: int
    orders: Orders
    starts: tuple[int, ...]
    same_stage: np.ndarray
    incoming: np.ndarray
    remote: np.ndarray
    what: np.ndarray
    place: np.ndarray
    micro: np.ndarray

    @property
    def size(self) -> int:
        """Number of operations."""
        return len(self.what)


@lru_cache(maxsize=32)
def timetable(orders: Orders, chunks: int) -> Timetable:
    """As :func:`build_timetable`, remembered."""
    return build_timetable(orders, chunks)


def build_timetable(orders: Orders, chunks: int) -> Timetable:
    """Sorts the operations of ``orders`` into levels; ValueError when they wait for each other in a circle."""
    stages = len(orders)
    number: dict[tuple[int, Operation], int] = {}
    found: list[tuple[int, Operation]] = []
    befores: list[tuple[int, int]] = []
    starts = [0]
    position = [0] * stages
    while len(found) < sum(map(len, orders)):
        ready = []
        for stage, order in enumerate(orders):
            if position[stage] < len(order):
                needed = _needed(stage, order[position[stage]], stages, chunks)
                if needed is None or needed in number:
                    ready.append((stage, order[position[stage]], needed))
        if not ready:
            raise ValueError("the operations of this schedule wait for each other")
        for stage, operation, needed in ready:
            before = number[stage, orders[stage][position[stage] - 1]] if position[stage] else -1
            befores.append((before, number[needed] if needed else -1))
            found.append((stage, operation))
            position[stage] += 1
        for index in range(starts[-1], len(found)):
            number[found[index]] = index
        starts.append(len(found))
    links = np.array(befores)
    links[links < 0] = len(found)
    where = np.array([stage for stage, _ in found])
    what, chunk, micro = np.array([operation for _, operation in found]).T
    remote = np.append(where, -1)[links[:, 1]] != where
    return Timetable(
        stages, chunks, orders, tuple(starts), links[:, 0], links[:, 1], remote & (links[:, 1] < len(found)),
        what, chunk * stages + where, micro,
    )  # fmt: skip


def _needed(stage: int, operation: Operation, stages: int, chunks: int) -> tuple[int, Operation] | None:
    """The operation whose result this one needs, and its stage; the first forward pass needs none."""
    what, chunk, micro = operation
    place = chunk * stages + stage
    if what == WEIGHT:
        return stage, (BACKWARD, chunk, micro)
    if what == FORWARD:
        return ((place - 1) % stages, (FORWARD, (place - 1) // stages, micro)) if place else None
    if place == stages * chunks - 1:
        return stage, (FORWARD, chunk, micro)
    return (place + 1) % stages, (BACKWARD, (place + 1) // stages, micro)


@lru_cache(maxsize=64)
def alive(orders: Orders, chunks: int) -> tuple[np.ndarray, ...]:
    """Micro-batches whose activations a stage holds at once: for each stage the largest vectors, ``[vectors, chunks]``.

    Every moment holds at most what one of the vectors does, so a memory limit need only be checked for these.
    """
    return tuple(_largest(held_over_time(order, chunks)) for order in orders)


@lru_cache(maxsize=64)
def alive_in_backward(orders: Orders, chunks: int) -> tuple[tuple[np.ndarray, ...], ...]:
    """The same while a chunk is in its backward pass, for each stage and chunk: that is when it needs working memory."""
    return tuple(
        tuple(_largest(held[[what != FORWARD and own == chunk for what, own, _ in order]]) for chunk in range(chunks))
        for order, held in ((order, held_over_time(order, chunks)) for order in orders)
    )


def held_over_time(order: tuple[Operation, ...], chunks: int) -> np.ndarray:
    """Micro-batches held by each chunk while every operation of a stage runs, ``[operations, chunks]``."""
    change = np.zeros((len(order) + 1, chunks), int)
    last = {(chunk, micro): index for index, (what, chunk, micro) in enumerate(order) if what != FORWARD}
    for index, (what, chunk, _) in enumerate(order):
        if what == FORWARD:
            change[index, chunk] += 1
    for (chunk, _), index in last.items():
        change[index + 1, chunk] -= 1
    return change.cumsum(axis=0)[:-1]


def _largest(vectors: np.ndarray) -> np.ndarray:
    unique = np.unique(vectors, axis=0)[::-1]
    kept: list[np.ndarray] = []
    for vector in unique[np.argsort(-unique.sum(axis=1), kind="stable")]:
        if not any((vector <= other).all() for other in kept):
            kept.append(vector)
    return np.array(kept)
