"""Ranks of a run: the position of this process, sums over ranks, and the rows of a batch that each rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Rendezvous(Protocol):
    """A channel over which ranks add numbers and wait for each other."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums over all ranks. Blocks until every rank has called it."""


@dataclass(frozen=True)
class Ranks:
    """Rank ``rank`` of ``count``. Every method is collective: all ranks call it, in the same order.

    In a simulation (``simulated``) the other ranks do not exist. Methods return immediately, and sums have one term.
    """

    rank: int = 0
    count: int = 1
    rendezvous: Rendezvous | None = None
    simulated: bool = False

    @property
    def is_first(self) -> bool:
        """True on the rank that writes the shared files of a run. In a simulation every rank writes its own."""
        return self.rank == 0 or self.simulated

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums over all ranks in double precision. Blocks until every rank has called it."""
        return list(values) if self.rendezvous is None else self.rendezvous.sum(values)

    def gather(self, value: float) -> list[float]:
        """Return the values of all ranks, in rank order."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.count)])

    def barrier(self) -> None:
        """Block until every rank has called it."""
        self.sum([])

    def agree(self, choice: str, choices: Sequence[str]) -> str:
        """Return the first of ``choices`` that any rank has chosen; empty if none has."""
        chosen = self.sum([float(choice == name) for name in choices])
        return next((name for name, count in zip(choices, chosen, strict=True) if count), "")

    def ranks_where(self, condition: bool) -> list[int]:
        """Return the ranks on which ``condition`` is true."""
        return [rank for rank, flag in enumerate(self.gather(float(condition))) if flag]


SINGLE_RANK = Ranks()


class CollectiveRendezvous:
    """Sums over ranks that were not started by ``mindllm launch``, through a collective operator of MindSpore.

    Doubles are gathered as pairs of int32, which every device back end supports, and added on the host in rank order, so that
    every rank gets the same bits.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums over all ranks. Requires that MindSpore's communication is initialized."""
        import numpy as np
        from mindspore import Tensor
        from mindspore.ops.communication import all_gather_into_tensor

        sent = np.array([*values, 0.0], np.float64)  # a tensor has at least one element
        pairs = sent.view(np.int32)
        gathered = Tensor(np.zeros(self.count * pairs.size, np.int32))
        all_gather_into_tensor(gathered, Tensor(pairs))
        by_rank = gathered.asnumpy().copy().view(np.float64).reshape(self.count, sent.size)
        return [float(total) for total in by_rank.sum(axis=0)[:-1]]


@dataclass(frozen=True)
class BatchShard:
    """The rows of every global batch that a process reads: part ``index`` of ``count`` equal parts."""

    index: int = 0
    count: int = 1


FULL_BATCH = BatchShard()
