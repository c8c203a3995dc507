"""Ring attention (Liu et al., 2023): each rank has its queries, and the keys and values of a sequence rotate block by block.

A rank attends to one block at a time with the fused kernel, and merges the results by the largest score and the sum of
exponentials of each query (Dao, 2022). The backward pass rotates keys and values again, with their gradients so far. The kernel
receives the statistics of whole rows, so that the gradients of blocks add up to those of the whole.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P
from mindspore.ops.auto_generate import FlashAttentionScoreGrad

from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec
from mindllm.models.attention.flash_attention import BAND_BY_COMPRESSED_MASK, CAUSAL_BY_COMPRESSED_MASK, FULL_MASK
from mindllm.models.experts.grouped_experts import first_input
from mindllm.models.kernels import Kernels
from mindllm.models.weights import constant

EVERY = 2**31 - 1  # tokens before and after a query for a kernel without a band
RECOMPUTED = "recompute"  # an attribute the compiler reads
GRADIENTS_SCOPE = "Gradients/"  # the compiler recognizes operators of the backward pass by it
FAR_BELOW = 1e30  # more than any score is above another
MODES = (CAUSAL_BY_COMPRESSED_MASK, BAND_BY_COMPRESSED_MASK, FULL_MASK)
"""Kernel modes: keys up to the query in order, keys from the query on in reverse order, all keys."""
Pieces = tuple[Tensor, ...]
Statistics = tuple[Tensor, Tensor, Tensor]
""":class:`Ring`'s largest score and sum of exponentials of queries, and their context in fp32."""
Gradients = tuple[Pieces, Pieces, Pieces]
"""Gradients of pieces of queries, keys and values."""


class Backward(nn.Cell):
    """A cell called by a ``bprop``. The compiler recognizes it by the start of its scope: otherwise it would use results of the
    forward pass instead of recomputed ones.
    """

    def _set_scope(self, name: str) -> None:
        super()._set_scope(GRADIENTS_SCOPE + name)

    def _set_recompute_scope(self) -> None:
        """Recompute nothing of it."""


class RingAttention(nn.Cell):
    """Causal attention of a sequence that devices share, shapes of :class:`.FlashAttention`; tokens are in order, or in
    balanced halves.

    The compiler sees one operator, which is expanded when all tensors are those of a device (:meth:`split`).
    """

    def __init__(self, spec: AttentionSpec | LatentAttentionSpec, kernels: Kernels) -> None:
        super().__init__()
        heads = spec.num_heads // kernels.tensor_ranks
        self.ring = Ring(heads, spec.scale, kernels.sequence_ranks, kernels.balanced)
        self.place = constant("place", np.zeros(1, np.int32))

    def split(self, group: str, place: int) -> None:
        """Make one operator of the computation of a device, which is at ``place`` in the ``group`` of a sequence."""
        self.place.set_data(Tensor(np.array([place], np.int32)))
        for exchange in self.exchanges():
            exchange.split(group, place)
        self.on_parts = P.Morph(self.attend, first_input, first_input)

    def exchanges(self) -> tuple[PassOn, ...]:
        """Return the cells that pass tensors on."""
        return self.ring.pass_on, self.ring.gradient.pass_on, self.ring.gradient.pass_gradients

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor:
        return self.on_parts(query, key, value, mask, self.place)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, place: Tensor) -> Tensor:
        """Compute attention of a device's tensors, ``[batch, heads, tokens, d]``."""
        mask, place = P.stop_gradient(mask), P.stop_gradient(place)  # or the compiler of MindSpore 2.10 fails
        return self.ring(query, key, value, mask, place)[0]


class RoundTheRing(nn.Cell):
    """The common part of both passes. Queries and keys of a rank are one piece, or ``balanced`` an early and a late one, which is
    reversed.

    All ranks compute equal operators, so that their exchanges have one order. Tensors with 1 or 0 select the visible keys. After
    ``step`` exchanges a rank has the keys of an earlier rank or, past the first one, of a later one. In order, it sees the
    former. In balanced halves late queries see all early keys. Additionally, early queries see early keys of an earlier rank, or
    late queries the late keys of a later one.
    """

    def __init__(self, ranks: int, balanced: bool) -> None:
        super().__init__()
        self.ranks, self.balanced = ranks, balanced
        self.cut = P.Slice()
        self.join = P.Concat(axis=2)
        self.add, self.less, self.mul = P.Add(), P.Sub(), P.Mul()
        self.is_earlier = P.GreaterEqual()
        self.behind = P.Depend()
        self.cast = P.Cast()

    def earlier(self, place: Tensor) -> Tensor:
        """Return for each step 1 if the keys are of an earlier rank, else 0: fp32 ``[steps]``."""
        return self.cast(self.is_earlier(place, step_numbers(self.ranks)), ms.float32)

    def at(self, step: int, values: Tensor) -> Tensor:
        """Return the value of one step, ``[1]``."""
        return self.cut(values, (step,), (1,))

    def chosen(self, pieces: Pieces, early: Tensor, late: Tensor) -> Tensor:
        """Return the early piece if ``early`` is 1, the late one if ``late`` is 1, else zeros."""
        early_part = self.mul(pieces[0], self.cast(early, pieces[0].dtype))
        return (
            self.add(early_part, self.mul(pieces[1], self.cast(late, pieces[1].dtype))) if self.balanced else early_part
        )

    def chosen_keys(self, pieces: Pieces, early: Tensor, late: Tensor) -> Tensor:
        """Return the selected piece of keys or values. In order there is only one piece."""
        return self.chosen(pieces, early, late) if self.balanced else pieces[0]

    def cut_up(self, x: Tensor) -> Pieces:
        """Return the pieces of ``[batch, heads, tokens, d]``."""
        if not self.balanced:
            return (x,)
        batch, heads, tokens, width = x.shape
        shape = (batch, heads, tokens // 2, width)
        return self.cut(x, (0, 0, 0, 0), shape), self.cut(x, (0, 0, tokens // 2, 0), shape)

    def joined(self, pieces: Pieces) -> Tensor:
        """Invert :meth:`cut_up`."""
        return self.join(pieces) if self.balanced else pieces[0]


class Ring(RoundTheRing):
    """Attention of one rank's queries to the keys of all: the context as the query, and fp32 statistics of each query, its
    largest score and the sum of exponentials, both ``[batch, heads, tokens, 8]`` with eight equal numbers.

    Keys are passed on during the attention to the previous ones. ``heads`` are the query heads of this rank.
    """

    def __init__(self, heads: int, scale: float, ranks: int, balanced: bool) -> None:
        super().__init__(ranks, balanced)
        self.causal, self.reversed, self.whole = (BlockAttention(mode, heads, scale) for mode in MODES)
        self.pass_on = PassOn(ranks)
        self.larger, self.exp, self.div = P.Maximum(), P.Exp(), P.Div()
        self.gradient = RingGradient(heads, scale, ranks, balanced)

    def _set_recompute_scope(self) -> None:
        """Mark the operators. A mark of the scope would also apply to the ``bprop``, as if it were part of the forward pass."""
        for operator in vars(self).values():
            if isinstance(operator, P.Primitive):
                operator.add_prim_attr(RECOMPUTED, True)

    def construct(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = self.cut_up(query)
        keys, values = self.cut_up(self.behind(key, query)), self.cut_up(self.behind(value, query))
        earlier = self.earlier(place)
        later = self.less(1.0, earlier)
        early = self.causal(queries[0], keys[0], values[0], mask)
        late = self.reversed(queries[1], keys[1], values[1], mask) if self.balanced else early
        if self.balanced:
            late = self.merged(late, self.whole(queries[1], keys[0], values[0], mask))
        previous = query
        for step in range(1, self.ranks):
            sent = self.behind(keys[0], previous)
            previous = early[2]
            keys, values = split_halves(self.pass_on((sent, *keys[1:], *values)))
            if self.balanced:
                late = self.merged(late, self.whole(self.behind(queries[1], early[2]), keys[0], values[0], mask))
            is_earlier, is_later = self.at(step, earlier), self.at(step, later)
            chosen = self.behind(self.chosen(queries, is_earlier, is_later), (early[2], late[2]))
            key_results = self.chosen_keys(keys, is_earlier, is_later)
            results = self.whole(chosen, key_results, self.chosen_keys(values, is_earlier, is_later), mask)
            early = self.merged(early, self.mask_statistics(is_later, results))
            if self.balanced:
                late = self.merged(late, self.mask_statistics(is_earlier, results))
        if not self.balanced:
            return self.cast(early[2], query.dtype), early[0], early[1]
        context = self.cast(self.joined((early[2], late[2])), query.dtype)
        return context, self.joined((early[0], late[0])), self.joined((early[1], late[1]))

    def bprop(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        place: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
        dout: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return gradients of query, key and value; mask and place have none."""
        gradients = self.gradient(query, key, value, mask, place, out, dout[0])
        return gradients[0], gradients[1], gradients[2], P.zeros_like(mask), P.zeros_like(place)

    def mask_statistics(self, hidden: Tensor, statistics: Statistics) -> Statistics:
        """Return the statistics, with a score far below all others where ``hidden`` is 1."""
        return self.less(statistics[0], self.mul(hidden, FAR_BELOW)), statistics[1], statistics[2]

    def merged(self, earlier: Statistics, block: Statistics) -> Statistics:
        """Merge statistics and context of earlier keys and of another block."""
        most = self.larger(earlier[0], block[0])
        before = self.mul(earlier[1], self.exp(self.less(earlier[0], most)))
        added = self.mul(block[1], self.exp(self.less(block[0], most)))
        both = self.add(before, added)
        context = self.mul(earlier[2], self.column(self.div(before, both)))
        return most, both, self.add(context, self.mul(block[2], self.column(self.div(added, both))))

    def column(self, x: Tensor) -> Tensor:
        """Return the first of the equal numbers: ``[batch, heads, tokens, 1]``."""
        return self.cut(x, (0, 0, 0, 0), (x.shape[0], x.shape[1], x.shape[2], 1))


class RingGradient(Backward, RoundTheRing):
    """Gradients of query, key and value of :class:`Ring`. Those of keys and values, summed over ranks, end where they started.

    Keys rotate again and wait for the gradient of the context, so that those of the forward pass are not saved. Each exchange and
    each block wait for the previous one, so that not all results are in memory together.
    """

    def __init__(self, heads: int, scale: float, ranks: int, balanced: bool) -> None:
        super().__init__(ranks, balanced)
        self.causal, self.reversed, self.whole = (BlockGradient(mode, heads, scale) for mode in MODES)
        self.pass_on, self.pass_gradients = PassOnBackward(ranks), PassOnBackward(ranks)

    def construct(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, place: Tensor, out: Statistics, gradient: Tensor
    ) -> Pieces:
        first = (gradient, out[0])
        queries = self.cut_up(query)
        keys, values = self.cut_up(self.behind(key, first)), self.cut_up(self.behind(value, first))
        row_values = (self.cut_up(gradient), self.cut_up(out[1]), self.cut_up(out[2]), self.cut_up(out[0]))
        earlier = self.earlier(self.behind(place, gradient))
        later = self.less(1.0, earlier)
        results = self.local_gradients(queries, keys, values, mask, row_values)
        query_results, key_results, value_results = results[0], results[1], results[2]
        sent = keys[0]
        for step in range(1, self.ranks):
            keys, values = split_halves(self.pass_on((sent, *keys[1:], *values)))
            key_results = (self.behind(key_results[0], keys[0]), *key_results[1:])
            key_results, value_results = split_halves(self.pass_gradients((*key_results, *value_results)))
            sent = self.behind(keys[0], key_results[0])
            queries = (*queries[:-1], self.behind(queries[-1], query_results))
            results = (query_results, key_results, value_results)
            if self.balanced:
                results = self.with_late_queries(results, queries, keys, values, mask, row_values)
            chosen = (self.at(step, earlier), self.at(step, later))
            results = self.with_chosen(results, queries, keys, values, mask, row_values, chosen)
            query_results, key_results, value_results = results[0], results[1], results[2]
        key_results, value_results = split_halves(self.pass_gradients((*key_results, *value_results)))
        query_gradient = self.behind(self.joined(query_results), (*key_results, *value_results))
        return query_gradient, self.joined(key_results), self.joined(value_results)

    def local_gradients(
        self, queries: Pieces, keys: Pieces, values: Pieces, mask: Tensor, row_values: tuple[Pieces, ...]
    ) -> Gradients:
        """Return gradients of pieces of queries, keys and values from the keys of the rank itself."""
        early = self.causal(queries[0], keys[0], values[0], mask, select_piece(row_values, 0))
        if not self.balanced:
            return (early[0],), (early[1],), (early[2],)
        late = self.reversed(queries[1], keys[1], values[1], mask, select_piece(row_values, 1))
        gradients = ((early[0], late[0]), (early[1], late[1]), (early[2], late[2]))
        return self.with_late_queries(gradients, queries, keys, values, mask, row_values)

    def with_late_queries(
        self,
        gradients: Gradients,
        queries: Pieces,
        keys: Pieces,
        values: Pieces,
        mask: Tensor,
        row_values: tuple[Pieces, ...],
    ) -> Gradients:
        """Add the gradients from early keys that late queries see."""
        more = self.whole(queries[1], keys[0], values[0], mask, select_piece(row_values, 1))
        return (
            (gradients[0][0], self.add(gradients[0][1], more[0])),
            (self.add(gradients[1][0], more[1]), gradients[1][1]),
            (self.add(gradients[2][0], more[2]), gradients[2][1]),
        )

    def with_chosen(
        self,
        gradients: Gradients,
        queries: Pieces,
        keys: Pieces,
        values: Pieces,
        mask: Tensor,
        row_values: tuple[Pieces, ...],
        chosen: tuple[Tensor, Tensor],
    ) -> Gradients:
        """Add the gradients from the keys of an earlier or a later rank."""
        early, late = chosen
        query_values = (
            self.chosen(row_values[0], early, late),
            self.chosen(row_values[1], early, late),
            self.chosen_keys(row_values[2], early, late),
            self.chosen_keys(row_values[3], early, late),
        )
        query, key = self.chosen(queries, early, late), self.chosen_keys(keys, early, late)
        more = self.whole(query, key, self.chosen_keys(values, early, late), mask, query_values)
        return (
            self.shared(gradients[0], more[0], early, late),
            self.shared(gradients[1], more[1], early, late),
            self.shared(gradients[2], more[2], early, late),
        )

    def shared(self, pieces: Pieces, gradient: Tensor, early: Tensor, late: Tensor) -> Pieces:
        """Add a gradient to the selected piece. In order it is 0 where nothing is seen."""
        if not self.balanced:
            return (self.add(pieces[0], gradient),)
        early_part = self.mul(gradient, self.cast(early, gradient.dtype))
        late_part = self.mul(gradient, self.cast(late, gradient.dtype))
        return self.add(pieces[0], early_part), self.add(pieces[1], late_part)


class BlockAttention(nn.Cell):
    """The fused kernel for as many keys as queries, ``[batch, heads, tokens, d]``: statistics, and the context in fp32."""

    def __init__(self, mode: int, heads: int, scale: float) -> None:
        super().__init__()
        self.masked = mode != FULL_MASK
        self.flash_attention = P.operations.nn_ops.FlashAttentionScore(**kernel_options(mode, heads, scale))
        self.cast = P.Cast()

    def construct(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Statistics:
        hidden = mask if self.masked else None
        results = self.flash_attention(query, key, value, None, None, None, hidden, None)
        return results[0], results[1], self.cast(results[3], ms.float32)


class BlockGradient(Backward):
    """Gradients of query, key and value of :class:`BlockAttention`. ``row_values`` are those of
    whole rows: the gradient of the context, both statistics, and the context.
    """

    def __init__(self, mode: int, heads: int, scale: float) -> None:
        super().__init__()
        self.masked = mode != FULL_MASK
        self.flash_attention = FlashAttentionScoreGrad(**kernel_options(mode, heads, scale))

    def construct(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, row_values: Pieces
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, largest, total, context = row_values
        hidden = mask if self.masked else None
        results = self.flash_attention(
            query, key, value, gradient, None, None, None, hidden, largest, total, None, context, None
        )
        return results[0], results[1], results[2]


def kernel_options(mode: int, heads: int, scale: float) -> dict[str, int | float | str]:
    """Return options of the kernel and of its gradient."""
    return {
        "head_num": heads,
        "keep_prob": 1.0,
        "scale_value": scale,
        "input_layout": "BNSD",
        "inner_precise": 0,
        "sparse_mode": mode,
        "pre_tokens": 0 if mode == BAND_BY_COMPRESSED_MASK else EVERY,
        "next_tokens": EVERY,
    }


class PassOn(nn.Cell):
    """Sends tensors to the next rank and returns those of the previous one, in one exchange."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.concat = P.Concat()
        self.cut = P.Slice()
        self.reshape = P.Reshape()

    def split(self, group: str, place: int) -> None:
        """Set the rank at ``place`` in the ``group``."""
        self.following, self.previous = (place + 1) % self.ranks, (place - 1) % self.ranks
        self.exchange = P.AlltoAllV(group, 1)

    def construct(self, tensors: Pieces) -> Pieces:
        flat: Pieces = ()
        for tensor in tensors:
            flat = (*flat, self.reshape(tensor, (-1,)))
        joined = self.concat(flat)
        sent = exchange_sizes(self.ranks, self.following, joined.shape[0])
        arriving = exchange_sizes(self.ranks, self.previous, joined.shape[0])
        received = self.exchange(joined, sent, arriving)
        results: Pieces = ()
        start = 0
        for index in range(len(tensors)):
            count = flat[index].shape[0]
            results = (*results, self.reshape(self.cut(received, (start,), (count,)), tensors[index].shape))
            start = start + count
        return results


class PassOnBackward(Backward, PassOn):
    """:class:`PassOn` in the backward pass."""


def select_piece(statistics: tuple[Pieces, ...], number: int) -> Pieces:
    """Return the statistics of one piece of queries."""
    return statistics[0][number], statistics[1][number], statistics[2][number], statistics[3][number]


def split_halves(tensors: Pieces) -> tuple[Pieces, Pieces]:
    """Split a tuple of keys followed by as many values."""
    count = len(tensors) // 2
    return tensors[:count], tensors[count:]


@ms.constexpr
def step_numbers(ranks: int) -> Tensor:
    """Return ``0 … ranks - 1`` as int32 ``[ranks]``."""
    return Tensor(np.arange(ranks, dtype=np.int32))


@ms.constexpr
def exchange_sizes(ranks: int, rank: int, count: int) -> tuple[int, ...]:
    """Return the elements exchanged with each rank: all with one rank."""
    return tuple(count if index == rank else 0 for index in range(ranks))
