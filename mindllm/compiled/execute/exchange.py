"""Exchanges between ranks: what a rank waits for, when an exchange is complete, and what everyone then gets.

Reductions add in the order of the group's ranks, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.compiled.graph import Node
from mindllm.errors import CheckFailed

SEND, RECEIVE = "Send", "Receive"
REDUCTIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class Deadlock(CheckFailed):
    """No rank can go on; the message names what each of them waits for."""


@dataclass(frozen=True)
class Exchange:
    """A rank at a collective operator, with what it gives."""

    rank: int
    node: Node
    value: np.ndarray | None

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
        return int(self.node.attributes["dst_global_rank" if self.op == SEND else "src_global_rank"])

    @property
    def channel(self) -> tuple[int, int, int]:
        """Source, destination and tag of a Send or Receive."""
        ends = (self.rank, self.peer) if self.op == SEND else (self.peer, self.rank)
        return (*ends, int(self.node.attributes["sr_tag"]))

    def fits(self, other: Exchange) -> bool:
        """Whether two ranks of a group wait in the same operator of the same kind."""
        same = ("group", "op")
        attributes, others = self.node.attributes, other.node.attributes
        return (
            self.op == other.op
            and self.group == other.group
            and all(attributes.get(name) == others.get(name) for name in same)
        )

    def describe(self) -> str:
        """What the rank waits for, in words."""
        if self.op in (SEND, RECEIVE):
            direction = "to" if self.op == SEND else "from"
            return f"rank {self.rank} waits in {self.op} {direction} rank {self.peer} at {self.node.scope}"
        ranks = ", ".join(map(str, self.group))
        return f"rank {self.rank} waits in {self.op} over ranks {ranks} at {self.node.scope}"


def complete(waiting: Mapping[int, Exchange], rank: int) -> Sequence[Exchange] | None:
    """The exchanges of all ranks in ``rank``'s group, in the group's order, once all of them wait in it."""
    mine = waiting[rank]
    others = [waiting.get(other) for other in mine.group]
    if any(other is None or not mine.fits(other) for other in others):
        return None
    return [other for other in others if other is not None]


def results(exchanges: Sequence[Exchange]) -> list[np.ndarray]:
    """What every rank of a group gets, in the group's order.

    Raises:
        NotImplementedError: a collective operator without an entry here.
    """
    op, attributes = exchanges[0].op, exchanges[0].node.attributes
    values = [np.asarray(exchange.value) for exchange in exchanges]
    count = len(values)
    if op == "AllReduce":
        return [_reduce(values, attributes["op"])] * count
    if op == "AllGather":
        return [np.concatenate(values)] * count
    if op == "ReduceScatter":
        return list(np.split(_reduce(values, attributes["op"]), count))
    if op == "Broadcast":
        return [values[int(attributes["root_rank"])]] * count
    if op == "AlltoAll":
        return _all_to_all(values, int(attributes["split_dim"]), int(attributes["concat_dim"]))
    raise NotImplementedError(f"collective operator {op}")


def _reduce(values: Sequence[np.ndarray], kind: str) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = REDUCTIONS[kind](total, value)
    return total


def _all_to_all(values: Sequence[np.ndarray], split: int, concat: int) -> list[np.ndarray]:
    """Part ``i`` of every rank's value goes to the group's rank ``i``."""
    parts = [np.split(value, len(values), split) for value in values]
    return [np.concatenate([part[index] for part in parts], concat) for index in range(len(values))]
