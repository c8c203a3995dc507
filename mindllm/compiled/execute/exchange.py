"""Exchanges between ranks: what a rank waits for, when an exchange is complete, and what everyone then gets.

Reductions add in the order of the group's ranks, in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.graph.compiled_graph import COLLECTIVES, IN_LENGTHS, Node
from mindllm.errors import CheckFailed, RunFailed

SEND, RECEIVE = "Send", "Receive"
REDUCTIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class Deadlock(CheckFailed):
    """Ranks cannot end their step; the message names what each of them waits for, and what was sent in vain."""


class UnequalParts(CheckFailed):
    """Ranks of a group give arrays of different shapes, or one that cannot be dealt out to all; names them with their place."""


class UnequalCounts(CheckFailed):
    """A rank sends another more or less than that one expects, or has; names both with the place."""


class NoExchange(RunFailed):
    """An exchange that nothing here can carry out; names it with a rank and its place in the model."""


@dataclass(frozen=True)
class Exchange:
    """A rank at a collective operator, with what it gives, and the operator's other operands."""

    rank: int
    node: Node
    value: np.ndarray | None
    others: tuple[Any, ...] = ()

    @property
    def op(self) -> str:
        return self.node.op

    @property
    def group(self) -> tuple[int, ...]:
        """Global ranks of the group, in its order."""
        return self.node.ranks

    @property
    def peer(self) -> int:
        """Global rank a Send goes to or a Receive comes from."""
        known, in_group = ("dst_global_rank", "dest_rank") if self.op == SEND else ("src_global_rank", "src_rank")
        attributes = self.node.attributes
        return int(attributes[known] if known in attributes else self.group[int(attributes[in_group])])

    @property
    def channel(self) -> tuple[int, int, int]:
        """Source, destination and tag of a Send or Receive."""
        ends = (self.rank, self.peer) if self.op == SEND else (self.peer, self.rank)
        return (*ends, int(self.node.attributes["sr_tag"]))

    def fits(self, other: Exchange) -> bool:
        """Return True if two ranks of a group wait in the same operator of the same kind."""
        same = ("group", "op", "block_size")
        attributes, others = self.node.attributes, other.node.attributes
        return (
            self.op == other.op
            and self.group == other.group
            and all(attributes.get(name) == others.get(name) for name in same)
        )

    def describe(self) -> str:
        """Describe what the rank waits for."""
        if self.op in (SEND, RECEIVE):
            direction = "to" if self.op == SEND else "from"
            tag = self.channel[2]
            return f"rank {self.rank} waits in {self.op} {direction} rank {self.peer} at {self.node.scope} (tag {tag})"
        ranks = ", ".join(map(str, self.group))
        return f"rank {self.rank} waits in {self.op} over ranks {ranks} at {self.node.scope}"


def complete(waiting: Mapping[int, Exchange], rank: int) -> Sequence[Exchange] | None:
    """Return the exchanges of all ranks in ``rank``'s group, in the group's order, once all of them wait in it.

    Raises:
        NoExchange: the operator does not say which ranks they are.
    """
    mine = waiting[rank]
    if not mine.group:
        raise _unknown(mine, "its group is known by name alone")
    others = [waiting.get(other) for other in mine.group]
    if any(other is None or not mine.fits(other) for other in others):
        return None
    return [other for other in others if other is not None]


def results(exchanges: Sequence[Exchange]) -> list[np.ndarray]:
    """Return the result of each rank of a group, in the group's order.

    Raises:
        NoExchange: a collective operator, or a kind of reduction, without an entry here.
        UnequalParts: shapes that do not go together.
        UnequalCounts: lengths that do not.
    """
    first = exchanges[0]
    attributes, values = first.node.attributes, [np.asarray(exchange.value) for exchange in exchanges]
    count = len(values)
    if first.op != IN_LENGTHS:
        _require_equal_parts(exchanges, values)
    match first.op:
        case "AllReduce":
            return [_reduce(values, first)] * count
        case "AllGather":
            return [np.concatenate(values)] * count
        case "ReduceScatter":
            return list(np.split(_reduce(values, first), count))
        case "Broadcast":
            return [values[int(attributes["root_rank"])]] * count
        case "AlltoAll":
            return _all_to_all(values, int(attributes["split_dim"]), int(attributes["concat_dim"]))
        case _ if first.op == IN_LENGTHS:
            return _all_to_all_in_lengths(exchanges, values)
    raise _unknown(first, f"known are {', '.join(sorted(COLLECTIVES))}")


def _require_equal_parts(exchanges: Sequence[Exchange], values: Sequence[np.ndarray]) -> None:
    """Raise if ranks pass different shapes, or if a dimension does not divide into parts."""
    first, shape = exchanges[0], values[0].shape
    for exchange, value in zip(exchanges, values, strict=True):
        if value.shape != shape:
            raise UnequalParts(
                f"{first.op} at {first.node.scope}: rank {first.rank} gives {list(shape)}, "
                f"rank {exchange.rank} {list(value.shape)}"
            )
    axis = {"ReduceScatter": 0, "AlltoAll": first.node.attributes.get("split_dim")}.get(first.op)
    if axis is not None and shape[axis] % len(values):
        raise UnequalParts(
            f"{first.op} at {first.node.scope}: {list(shape)} cannot be dealt out to {len(values)} ranks"
        )


def _reduce(values: Sequence[np.ndarray], exchange: Exchange) -> np.ndarray:
    kind = exchange.node.attributes.get("op")
    if kind not in REDUCTIONS:
        raise _unknown(exchange, f"it reduces by {kind}, known are {', '.join(REDUCTIONS)}")
    return functools.reduce(REDUCTIONS[kind], values)


def _unknown(exchange: Exchange, why: str) -> NoExchange:
    ranks = ", ".join(map(str, exchange.group))
    return NoExchange(
        f"rank {exchange.rank}: {exchange.op} over ranks {ranks} at {exchange.node.scope} cannot be carried out here: {why}"
    )


def _all_to_all(values: Sequence[np.ndarray], split: int, concat: int) -> list[np.ndarray]:
    """Send part ``i`` of every rank's value to the group's rank ``i``."""
    parts = [np.split(value, len(values), split) for value in values]
    return [np.concatenate([part[index] for part in parts], concat) for index in range(len(values))]


def _all_to_all_in_lengths(exchanges: Sequence[Exchange], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """AlltoAllV: every rank cuts ``[elements]`` into lengths, of which the ``i``-th goes to the group's rank ``i``, and says what
    it expects of each; both count blocks of ``block_size`` elements.
    """
    first = exchanges[0]
    if any(len(one.others) < len(("sent", "expected")) for one in exchanges):
        raise _unknown(first, "it says neither what it sends each rank nor what it expects")
    sent, expected = (np.array([np.asarray(one.others[side]) for one in exchanges]) for side in (0, 1))
    block = int(first.node.attributes.get("block_size", 1))
    for exchange, value, lengths in zip(exchanges, values, sent, strict=True):
        if value.shape != (lengths.sum() * block,):
            message = f"rank {exchange.rank} has {list(value.shape)} elements and sends {lengths.sum() * block}"
            raise UnequalCounts(f"{exchange.op} at {exchange.node.scope}: {message}")
    for source, target in np.argwhere(sent != expected.T):
        one, other = exchanges[source], exchanges[target]
        raise UnequalCounts(
            f"{one.op} at {one.node.scope}: rank {one.rank} sends rank {other.rank} {sent[source, target]} blocks, "
            f"which expects {expected[target, source]}"
        )
    parts = [np.split(value, np.cumsum(lengths[:-1]) * block) for value, lengths in zip(values, sent, strict=True)]
    return [np.concatenate([part[index] for part in parts]) for index in range(len(values))]
