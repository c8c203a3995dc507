"""The order of operations on every stage of a pipeline, and the levels in which they can be timed together.

1F1B: Narayanan et al. 2021 (2104.04473), section 2.2, with the interleaved form of Megatron-LM: forward passes go through the
chunks in groups of as many micro-batches as stages. Backward passes go through them in the opposite order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np

from mindllm.architecture.layer_counts import IN_PIECES, ZERO_BUBBLE_V, places_in_order
from mindllm.schedules import in_pieces
from mindllm.schedules.operations import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Operation
from mindllm.schedules.zero_bubble_v import stage_order


class Orders(tuple[tuple[Operation, ...], ...]):
    """The operations of every stage in their order; its hash is made once, because there may be millions of them.

    ``v_shape``: every second chunk runs back through the stages.
    """

    v_shape: bool

    def __new__(cls, stages: Iterable[tuple[Operation, ...]], v_shape: bool = False) -> Orders:
        orders = super().__new__(cls, stages)
        orders.v_shape = v_shape
        return orders

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Kind, chunk and micro-batch of the operations of each stage as numbers, ``[3, operations]``."""
        flat = (np.fromiter(chain.from_iterable(order), np.int64, 3 * len(order)) for order in self)
        return tuple(numbers.reshape(-1, 3).T for numbers in flat)


@lru_cache(maxsize=64)
def stage_orders(schedule: str, stages: int, chunks: int, micro_batches: int, pieces: int = 1) -> Orders:
    """The operations of every stage in their order, of a schedule that does not depend on times.

    ``pieces``: in which a sequence goes through the pipeline; then micro-batches of operations are numbers of passes, as
    :mod:`mindllm.schedules.in_pieces` counts them.
    """
    if schedule in IN_PIECES:
        return Orders(
            in_pieces.stage_order(schedule, stage, stages, chunks, micro_batches, pieces) for stage in range(stages)
        )
    if schedule == ZERO_BUBBLE_V:
        return Orders((stage_order(stage, stages, micro_batches) for stage in range(stages)), v_shape=True)
    groups = _groups(stages, micro_batches)
    forwards = [(FORWARD, chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
    backwards = [(BACKWARD, chunk, micro) for group in groups for chunk in reversed(range(chunks)) for micro in group]
    orders = []
    for stage in range(stages):
        warm_up = _warm_up(schedule, stage, stages, chunks, len(groups[0]), len(forwards))
        pairs = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
        orders.append((*forwards[:warm_up], *pairs, *backwards[len(forwards) - warm_up :]))
    return Orders(orders)


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Return groups of ``stages`` micro-batches; the rest joins the first, as in MindSpore: a smaller group would deadlock."""
    first = min(stages + micro_batches % stages, micro_batches)
    starts = [0, *range(first, micro_batches, stages)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], micro_batches], strict=True)]


def _warm_up(schedule: str, stage: int, stages: int, chunks: int, group: int, total: int) -> int:
    """Return the forward passes of a stage before its first pair of one forward and one backward."""
    later_stages = stages - 1 - stage
    if schedule == "gpipe":
        return total
    if chunks > 1 and schedule == "1f1b":
        later_stages *= 2
    return min(total, (chunks - 1) * group + later_stages)


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
    """Sort the operations of ``orders`` into levels; ValueError if they wait for each other in a circle."""
    stages, sizes = len(orders), np.array([len(order) for order in orders])
    first = sizes.cumsum() - sizes  # operations are numbered stage by stage here
    where = np.repeat(np.arange(stages), sizes)
    kind, chunk, micro = np.concatenate(orders.arrays, axis=1)
    needed = _needed(where, kind, chunk, micro, places_in_order(stages, chunks, orders.v_shape))
    level, starts = _levels(first, sizes, needed)
    by_level = np.argsort(level, kind="stable")
    number = np.append(np.empty_like(by_level), len(by_level))
    number[by_level] = np.arange(len(by_level))
    before = np.arange(len(by_level)) - 1
    before[first[sizes > 0]] = len(by_level)
    remote = (np.append(where, -1)[needed] != where) & (needed < len(where))
    return Timetable(
        stages, chunks, orders, starts, number[before][by_level], number[needed][by_level], remote[by_level],
        kind[by_level], (chunk * stages + where)[by_level], micro[by_level],
    )  # fmt: skip


def _needed(
    where: np.ndarray, kind: np.ndarray, chunk: np.ndarray, micro: np.ndarray, places: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return the operation whose result each needs, ``[operations]``; the number of operations if it needs none.

    ``places``: chunk and stage in the order of a micro-batch.

    Raises:
        ValueError: an operation needs one that the schedule lacks.
    """
    count, micros, last = len(where), int(micro.max(initial=-1)) + 1, len(places) - 1
    chunks, stages = np.array(places).max(axis=0) + 1
    visit = np.empty((chunks, stages), np.int64)
    visit[tuple(np.array(places).T)] = np.arange(len(places))
    place = visit[chunk, where]
    kind = np.where(kind == INPUT, BACKWARD, kind)  # others wait for either
    number = np.full(KINDS * (last + 1) * micros + 1, -1)
    number[(kind * (last + 1) + place) * micros + micro] = np.arange(count)
    needed_kind = np.where((kind == WEIGHT) | ((kind == BACKWARD) & (place < last)), BACKWARD, FORWARD)
    source = np.where(kind == WEIGHT, place, np.where(kind == FORWARD, place - 1, np.minimum(place + 1, last)))
    needed = number[(needed_kind * (last + 1) + source) * micros + micro]
    needed[(kind == FORWARD) & (place == 0)] = count
    if (needed < 0).any():
        raise ValueError("an operation of this schedule needs one that it does not have")
    return needed


def _levels(first: np.ndarray, sizes: np.ndarray, needed: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the level of every operation, and the start of each level in the sorted operations."""
    total = len(needed)
    level, starts = np.empty(total, np.int64), [0]
    finished = np.zeros(total + 1, bool)
    finished[total] = True
    now, end = first[sizes > 0], (first + sizes)[sizes > 0]
    while len(now):
        moving = finished[needed[now]]
        ready = now[moving]
        if not len(ready):
            raise ValueError("the operations of this schedule wait for each other")
        level[ready] = len(starts)
        finished[ready] = True
        starts.append(starts[-1] + len(ready))
        now = now + moving
        if (now == end).any():
            now, end = now[now < end], end[now < end]
    return level, tuple(starts)


@lru_cache(maxsize=64)
def alive(orders: Orders, chunks: int) -> tuple[np.ndarray, ...]:
    """Micro-batches whose activations a stage holds at once: for each stage the largest vectors, ``[vectors, chunks]``.

    Every moment holds at most what one of the vectors does, so a memory limit need only be checked for these.
    """
    return tuple(_largest(held_over_time(operations, chunks)) for operations in orders.arrays)


@lru_cache(maxsize=64)
def alive_in_backward(orders: Orders, chunks: int) -> tuple[tuple[np.ndarray, ...], ...]:
    """The same while a chunk is in its backward pass, for each stage and chunk: that is when it needs working memory."""
    return tuple(
        tuple(_largest(held[(what != FORWARD) & (own == chunk)]) for chunk in range(chunks))
        for (what, own, _), held in ((numbers, held_over_time(numbers, chunks)) for numbers in orders.arrays)
    )


def held_over_time(operations: np.ndarray, chunks: int) -> np.ndarray:
    """Return the micro-batches held by each chunk during every operation of a stage, ``[operations, chunks]``."""
    kind, chunk, micro = operations
    change = np.zeros((len(kind) + 1, chunks), int)
    change[np.flatnonzero(kind == FORWARD), chunk[kind == FORWARD]] = 1
    after = np.flatnonzero(kind != FORWARD)[::-1]
    last = after[np.unique((chunk * (micro.max() + 1) + micro)[after], return_index=True)[1]]
    np.subtract.at(change, (last + 1, chunk[last]), 1)
    return change.cumsum(axis=0)[:-1]


def _largest(vectors: np.ndarray) -> np.ndarray:
    if vectors.shape[1] == 1 and len(vectors):
        return vectors.max(axis=0, keepdims=True)
    unique = np.unique(vectors, axis=0)[::-1]
    kept: list[np.ndarray] = []
    for vector in unique[np.argsort(-unique.sum(axis=1), kind="stable")]:
        if not any((vector <= other).all() for other in kept):
            kept.append(vector)
    return np.array(kept)
