"""Sorted tokens on their way to the ranks of their experts, each rank's in lengths that the router decides, and back.

Counts go ahead by AlltoAll, rows follow by AlltoAllV, as in the dispatcher ``alltoall`` of Megatron-LM and of MindFormers 1.8,
which has it in graph mode and has constant counts in a dry run.
"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P
from mindspore.ops.auto_generate import InnerMoeTokenUnpermute, MoeTokenPermute, SortExt

HOST = "CPU"
Places = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The row of each choice; which of the rows that arrived stands where among the sorted ones, and the way back; how many rows are
sent to each rank, and how many of each arrive."""


class SentTokens(nn.Cell):
    """:class:`SortedTokens` of experts that other ranks share: rows are sent to the ranks of their experts and back.

    Hidden states ``[tokens, hidden]`` and chosen experts int32 ``[tokens, chosen]``, counted over all ranks, become the rows that
    all ranks have for the experts of this one, ``[arrived, hidden]`` in the order of its experts. Their number depends on the
    step.

    A rank without any rows would have a result without a shape. Therefore every rank sends at least one row of zeros to each,
    with a weight of zero (the tokens of :meth:`guarded`).

    Args:
        group: the group of the ``ranks`` that share ``experts``, this one at ``place``.
        balanced: counts are constants of a router that spreads rows evenly, for a dry run without values.
    """

    def __init__(self, experts: int, hidden: int, group: str, ranks: int, place: int, balanced: bool = False) -> None:
        super().__init__()
        self.experts, self.ranks, self.place, self.balanced = experts, ranks, place, balanced
        self.guard_tokens, self.guard_choices, self.guard_weights = (P.Concat() for _ in range(3))
        self.without_guards = P.StridedSlice()
        self.permute = MoeTokenPermute()
        self.sort = SortExt()
        self.onehot = P.OneHot()
        self.count = P.ReduceSum()
        self.of_rank, self.of_expert = P.ReduceSum(), P.ReduceSum()
        self.running = P.CumSum()
        self.exchange_counts = P.AlltoAll(ranks, 0, 0, group)
        self.send_numbers = P.AlltoAllV(group, 1)
        self.send, self.send_back = P.AlltoAllV(group, hidden), P.AlltoAllV(group, hidden)
        self.to_host = P.MoveTo()
        self.behind = P.Depend()
        self.sort_arrived, self.sort_back = RowsInOrder(), RowsInOrder()
        self.unpermute = InnerMoeTokenUnpermute()
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)
        self.cast = P.Cast()
        self.reshape = P.Reshape()
        for operator in (self.exchange_counts, self.to_host, self.send_numbers, self.sort):
            operator.add_prim_attr(
                "recompute", False
            )  # few numbers compared to rows, and without another wait for the host

    def construct(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Places, Tensor]:
        hidden = x.shape[1]
        x, chosen = self.guarded(x, chosen)
        rows, places = self.permute(x, chosen)
        numbers, _ = self.sorted(self.reshape(chosen, (-1,)))
        sent, arriving, ends = self.counts(chosen)
        arrived = self.reshape(self.send(self.reshape(rows, (-1,)), sent, arriving), (-1, hidden))
        _, order = self.sorted(self.send_numbers(numbers, sent, arriving))
        _, back = self.sorted(order)
        return self.sort_arrived(arrived, order, back), (places, order, back, sent, arriving), ends

    def guarded(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens of zeros, enough to choose all ranks."""
        guards = guard_choices(self.experts, self.ranks, chosen.shape[1])
        zeros = P.zeros((guards.shape[0], x.shape[1]), x.dtype)
        return self.guard_tokens((x, zeros)), self.guard_choices((chosen, guards))

    def sorted(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """int32 numbers in order, and which stands where, both int32; equal ones stay in their order."""
        values, order = self.sort(self.cast(numbers, ms.float32), -1, False, True)
        return self.cast(values, ms.int32), self.cast(order, ms.int32)

    def counts(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows for each rank, rows of each that arrive, both int64 ``[ranks]`` on the host, and the ends of the groups of those,
        int64 ``[experts of this rank]``.
        """
        local, rows = self.experts // self.ranks, chosen.shape[0] * chosen.shape[1]
        counts = self.count(self.onehot(self.reshape(chosen, (-1,)), self.experts, self.on, self.off), 0)
        counts = self.reshape(counts, (self.ranks, local))
        rank_counts = self.exchange_counts(counts)
        sent, arriving = self.on_host(counts), self.on_host(rank_counts)
        ends = self.cast(self.running(self.of_expert(rank_counts, 0), 0), ms.int64)
        if self.balanced:
            even_sent, even_arriving, even_ends = even_counts(rows, self.ranks, self.place, local)
            return even_sent, even_arriving, self.behind(even_ends, (sent, arriving, ends))
        return sent, arriving, ends

    def on_host(self, counts: Tensor) -> Tensor:
        """Sums over the experts of each rank, where the exchange reads them."""
        return self.to_host(self.cast(self.of_rank(counts, 1), ms.int64), HOST, True)

    def weighted_sum(self, y: Tensor, places: Places, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows back at their tokens, weighted by ``[tokens, chosen]`` and added up: ``[tokens, hidden]``."""
        choice_rows, order, back, sent, arriving = places
        (tokens, chosen), hidden = weights.shape, y.shape[1]
        guards = constant_guard_count(self.ranks, chosen)
        y = self.sort_back(y, back, order)
        y = self.send_back(self.reshape(y, (-1,)), arriving, sent)
        y = self.reshape(y, ((tokens + guards) * chosen, hidden))
        weights = self.guard_weights((weights, P.zeros((guards, chosen), weights.dtype)))
        y = self.unpermute(y, choice_rows, weights, False, None)
        return self.without_guards(y, (0, 0), (tokens, hidden), (1, 1))


class RowsInOrder(nn.Cell):
    """Rows ``[rows, hidden]`` in another order, int32 ``[rows]``: which stands where. ``back`` is the way back.

    The gradient takes it, too. The operator's own would keep the rows, or ask for their number, which the compiler does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.take = P.Gather()

    def construct(self, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        return self.take(rows, order, 0)

    def bprop(
        self, rows: Tensor, order: Tensor, back: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the rows; orders have none."""
        return self.take(dout, back, 0), P.zeros_like(order), P.zeros_like(back)


def guard_count(ranks: int, chosen: int) -> int:
    """Tokens with ``chosen`` experts each that choose ``ranks`` ranks."""
    return math.ceil(ranks / chosen)


constant_guard_count = ms.constexpr(guard_count)


@ms.constexpr
def guard_choices(experts: int, ranks: int, chosen: int) -> Tensor:
    """Experts of the tokens that are chosen for every rank: the first one of each, int32 ``[guards, chosen]``."""
    guards = guard_count(ranks, chosen)
    return Tensor((np.arange(guards * chosen, dtype=np.int32) % ranks * (experts // ranks)).reshape(guards, chosen))


@ms.constexpr
def even_counts(rows: int, ranks: int, place: int, local: int) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Return the counts of :meth:`SentTokens.counts` if every rank sends ``rows`` as evenly as possible."""
    sent = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    arriving = sent[place]
    ends = [arriving * ranks * (expert + 1) // local for expert in range(local)]
    return tuple(sent), (arriving,) * ranks, Tensor(np.array(ends, np.int64))
