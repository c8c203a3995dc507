"""The processes that train one model together: which of them this is, how they agree, and which rows of a
batch each reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Meeting(Protocol):
    """Where ranks wait for each other and add numbers."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks of as many values from each; waits for the last one."""


@dataclass(frozen=True)
class Ranks:
    """Rank ``rank`` of ``count``, and where they meet. Every method is called by all ranks, in the same order.

    In a simulation (``simulated``) the other ranks do not exist: nobody is waited for, and sums are this rank's own.
    """

    rank: int = 0
    count: int = 1
    meeting: Meeting | None = None
    simulated: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is the one rank that writes what a run has once; in a simulation every rank has files of its own."""
        return self.rank == 0 or self.simulated

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks of as many values from each, in double precision; waits for the last one."""
        return list(values) if self.meeting is None else self.meeting.sum(values)

    def meet(self) -> None:
        """Waits for the last rank."""
        self.sum([])

    def agree(self, choice: str, choices: Sequence[str]) -> str:
        """The first of ``choices`` that any rank has chosen; empty where none has."""
        chosen = self.sum([float(choice == name) for name in choices])
        return next((name for name, count in zip(choices, chosen, strict=True) if count), "")

    def which(self, answer: bool) -> list[int]:
        """The ranks whose ``answer`` is yes."""
        answers = self.sum([float(answer and rank == self.rank) for rank in range(self.count)])
        return [rank for rank, yes in enumerate(answers) if yes]


ALONE = Ranks()


class CollectiveMeeting:
    """Ranks that no launcher of ours has started, as on an Ascend cluster, meet in a collective operator of MindSpore.

    Doubles travel as pairs of int32, which device back ends gather, and are added on the host in the order of ranks: every
    rank gets the same bits.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def sum(self, values: Sequence[float]) -> list[float]:
        """As ``Meeting``; call it when MindSpore's communication is initialised."""
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
    """The rows of every global batch that a process is given: part ``index`` of ``count`` equal ones."""

    index: int = 0
    count: int = 1


FULL_BATCH = BatchShard()
