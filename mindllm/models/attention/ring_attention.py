"""Ring attention (Liu et al., 2023): each rank keeps its queries; keys and values of a sequence come round block by block.

A rank attends to one block at a time by the fused kernel, and merges what it finds by the largest score and the sum of
exponentials of each query (Dao, 2022). The backward pass sends keys and values round once more, with their gradients so far, and
gives the kernel the statistics of whole rows, by which the gradients of a block are those of the whole.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P
from mindspore.ops.auto_generate import FlashAttentionScoreGrad

from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec
from mindllm.models.attention.flash_attention import BAND_BY_COMPRESSED_MASK, CAUSAL_BY_COMPRESSED_MASK, WHOLE_MASK
from mindllm.models.experts.grouped_experts import first_of
from mindllm.models.kernels import Kernels
from mindllm.models.weights import constant

EVERY = 2**31 - 1  # tokens before and behind a query that a kernel without a band considers
RECOMPUTED = "recompute"  # an attribute the compiler reads
OF_GRADIENTS = "Gradients/"  # by which the compiler knows operators of the backward pass
FAR_BELOW = 1e30  # more than any score is above another
MODES = (CAUSAL_BY_COMPRESSED_MASK, BAND_BY_COMPRESSED_MASK, WHOLE_MASK)
"""Of the kernel for keys up to a query's own, in order; for those from its own on, which stand in reverse; for all."""
Pieces = tuple[Tensor, ...]
Statistics = tuple[Tensor, Tensor, Tensor]
""":class:`Ring`'s largest score and sum of exponentials of queries, and their context in fp32."""
Gradients = tuple[Pieces, Pieces, Pieces]
"""Of pieces of queries, keys and values."""


class Backward(nn.Cell):
    """Is called by a ``bprop``. The compiler knows that by the beginning of its scope: otherwise it would read what the forward
    pass computed, and not what is computed again.
    """

    def _set_scope(self, name: str) -> None:
        super()._set_scope(OF_GRADIENTS + name)

    def _set_recompute_scope(self) -> None:
        """Nothing of it is computed again."""


class RingAttention(nn.Cell):
    """Causal attention of a sequence that devices share, shapes of :class:`.FlashAttention`; tokens stand in order, or in
    balanced halves.

    The compiler sees one operator, which is opened when all tensors are those of a device (:meth:`split`).
    """

    def __init__(self, spec: AttentionSpec | LatentAttentionSpec, kernels: Kernels) -> None:
        super().__init__()
        heads = spec.num_heads // kernels.tensor_ranks
        self.ring = Ring(heads, spec.scale, kernels.sequence_ranks, kernels.balanced)
        self.place = constant("place", np.zeros(1, np.int32))

    def split(self, group: str, place: int) -> None:
        """Makes one operator of what a device computes: that at ``place`` among those of a sequence, a ``group``."""
        self.place.set_data(Tensor(np.array([place], np.int32)))
        for exchange in self.exchanges():
            exchange.split(group, place)
        self.on_parts = P.Morph(self.attend, first_of, first_of)

    def exchanges(self) -> tuple[PassOn, ...]:
        """What passes tensors on."""
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
        """The same of the tensors of a device, ``[batch, heads, tokens, d]``."""
        mask, place = P.stop_gradient(mask), P.stop_gradient(place)  # or the compiler of MindSpore 2.10 fails
        return self.ring(query, key, value, mask, place)[0]


class RoundTheRing(nn.Cell):
    """What both passes need. Queries and keys of a rank are one piece, or ``balanced`` an early and a late one, which stands in
    reverse.

    All ranks compute the same operators, or their exchanges would come in orders of their own: which keys are seen is a number,
    1 or 0, in tensors. After ``step`` exchanges a rank has the keys of an earlier rank or, past the first one, of a later.
    In order, it sees the former. In balanced halves late queries see all early keys; besides, early queries see early
    keys of an earlier rank, or late queries the late keys of a later one.
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
        """Whether keys are those of an earlier rank, after so many steps: 1 or 0, fp32 ``[steps]``."""
        return self.cast(self.is_earlier(place, numbers_of_steps(self.ranks)), ms.float32)

    def at(self, step: int, of_steps: Tensor) -> Tensor:
        """One number, ``[1]``."""
        return self.cut(of_steps, (step,), (1,))

    def chosen(self, pieces: Pieces, early: Tensor, late: Tensor) -> Tensor:
        """The early piece or, where ``early`` is 0, the late one; zeros, where there is none."""
        found = self.mul(pieces[0], self.cast(early, pieces[0].dtype))
        return self.add(found, self.mul(pieces[1], self.cast(late, pieces[1].dtype))) if self.balanced else found

    def chosen_keys(self, pieces: Pieces, early: Tensor, late: Tensor) -> Tensor:
        """The same of keys or values; in order they are those that came."""
        return self.chosen(pieces, early, late) if self.balanced else pieces[0]

    def cut_up(self, x: Tensor) -> Pieces:
        """The pieces of ``[batch, heads, tokens, d]``."""
        if not self.balanced:
            return (x,)
        batch, heads, tokens, width = x.shape
        shape = (batch, heads, tokens // 2, width)
        return self.cut(x, (0, 0, 0, 0), shape), self.cut(x, (0, 0, tokens // 2, 0), shape)

    def joined(self, pieces: Pieces) -> Tensor:
        """The way back from :meth:`cut_up`."""
        return self.join(pieces) if self.balanced else pieces[0]


class Ring(RoundTheRing):
    """Attention of one rank's queries to the keys of all: the context as the query, and fp32 statistics of each query, its
    largest score and the sum of exponentials, both ``[batch, heads, tokens, 8]`` with eight equal numbers.

    Keys are passed on while those before are attended to, and no sooner. ``heads`` are the query heads of this rank.
    """

    def __init__(self, heads: int, scale: float, ranks: int, balanced: bool) -> None:
        super().__init__(ranks, balanced)
        self.causal, self.reversed, self.whole = (BlockAttention(mode, heads, scale) for mode in MODES)
        self.pass_on = PassOn(ranks)
        self.larger, self.exp, self.div = P.Maximum(), P.Exp(), P.Div()
        self.gradient = RingGradient(heads, scale, ranks, balanced)

    def _set_recompute_scope(self) -> None:
        """By its operators: what a scope says holds for the ``bprop``, too, which would be taken for the forward pass."""
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
        done = query
        for step in range(1, self.ranks):
            sent = self.behind(keys[0], done)
            done = early[2]
            keys, values = halves_of(self.pass_on((sent, *keys[1:], *values)))
            if self.balanced:
                late = self.merged(late, self.whole(self.behind(queries[1], early[2]), keys[0], values[0], mask))
            is_earlier, is_later = self.at(step, earlier), self.at(step, later)
            chosen = self.behind(self.chosen(queries, is_earlier, is_later), (early[2], late[2]))
            of_keys = self.chosen_keys(keys, is_earlier, is_later)
            found = self.whole(chosen, of_keys, self.chosen_keys(values, is_earlier, is_later), mask)
            early = self.merged(early, self.seen_where(is_later, found))
            if self.balanced:
                late = self.merged(late, self.seen_where(is_earlier, found))
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
        """Gradients of query, key and value; mask and place have none."""
        found = self.gradient(query, key, value, mask, place, out, dout[0])
        return found[0], found[1], found[2], P.zeros_like(mask), P.zeros_like(place)

    def seen_where(self, hidden: Tensor, found: Statistics) -> Statistics:
        """What was found, but with a score far below any where it is ``hidden``, 1 or 0."""
        return self.less(found[0], self.mul(hidden, FAR_BELOW)), found[1], found[2]

    def merged(self, known: Statistics, found: Statistics) -> Statistics:
        """Statistics and context of the keys so far and those of a further block, as if they had been one."""
        most = self.larger(known[0], found[0])
        before = self.mul(known[1], self.exp(self.less(known[0], most)))
        further = self.mul(found[1], self.exp(self.less(found[0], most)))
        both = self.add(before, further)
        context = self.mul(known[2], self.column(self.div(before, both)))
        return most, both, self.add(context, self.mul(found[2], self.column(self.div(further, both))))

    def column(self, x: Tensor) -> Tensor:
        """The first of the equal numbers: ``[batch, heads, tokens, 1]``."""
        return self.cut(x, (0, 0, 0, 0), (x.shape[0], x.shape[1], x.shape[2], 1))


class RingGradient(Backward, RoundTheRing):
    """Gradients of query, key and value of :class:`Ring`. Those of keys and values end, all ranks' added up, where they began.

    Keys come round once more, and so wait for the gradient of the context: else those of the forward pass would be kept. Each
    exchange waits for the one before, and each block for the one before, or the results of all would be in memory at once.
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
        known = (self.cut_up(gradient), self.cut_up(out[1]), self.cut_up(out[2]), self.cut_up(out[0]))
        earlier = self.earlier(self.behind(place, gradient))
        later = self.less(1.0, earlier)
        found = self.of_own(queries, keys, values, mask, known)
        of_queries, of_keys, of_values = found[0], found[1], found[2]
        sent = keys[0]
        for step in range(1, self.ranks):
            keys, values = halves_of(self.pass_on((sent, *keys[1:], *values)))
            of_keys = (self.behind(of_keys[0], keys[0]), *of_keys[1:])
            of_keys, of_values = halves_of(self.pass_gradients((*of_keys, *of_values)))
            sent = self.behind(keys[0], of_keys[0])
            queries = (*queries[:-1], self.behind(queries[-1], of_queries))
            found = (of_queries, of_keys, of_values)
            if self.balanced:
                found = self.with_late_queries(found, queries, keys, values, mask, known)
            chosen = (self.at(step, earlier), self.at(step, later))
            found = self.with_chosen(found, queries, keys, values, mask, known, chosen)
            of_queries, of_keys, of_values = found[0], found[1], found[2]
        of_keys, of_values = halves_of(self.pass_gradients((*of_keys, *of_values)))
        of_query = self.behind(self.joined(of_queries), (*of_keys, *of_values))
        return of_query, self.joined(of_keys), self.joined(of_values)

    def of_own(
        self, queries: Pieces, keys: Pieces, values: Pieces, mask: Tensor, known: tuple[Pieces, ...]
    ) -> Gradients:
        """Gradients of pieces of queries, keys and values by the keys of the rank itself."""
        early = self.causal(queries[0], keys[0], values[0], mask, piece_of(known, 0))
        if not self.balanced:
            return (early[0],), (early[1],), (early[2],)
        late = self.reversed(queries[1], keys[1], values[1], mask, piece_of(known, 1))
        found = ((early[0], late[0]), (early[1], late[1]), (early[2], late[2]))
        return self.with_late_queries(found, queries, keys, values, mask, known)

    def with_late_queries(
        self,
        found: Gradients,
        queries: Pieces,
        keys: Pieces,
        values: Pieces,
        mask: Tensor,
        known: tuple[Pieces, ...],
    ) -> Gradients:
        """Further gradients added, by what late queries see of early keys."""
        more = self.whole(queries[1], keys[0], values[0], mask, piece_of(known, 1))
        return (
            (found[0][0], self.add(found[0][1], more[0])),
            (self.add(found[1][0], more[1]), found[1][1]),
            (self.add(found[2][0], more[2]), found[2][1]),
        )

    def with_chosen(
        self,
        found: Gradients,
        queries: Pieces,
        keys: Pieces,
        values: Pieces,
        mask: Tensor,
        known: tuple[Pieces, ...],
        chosen: tuple[Tensor, Tensor],
    ) -> Gradients:
        """Further gradients added, by what queries see of the keys of an earlier or a later rank."""
        early, late = chosen
        of_queries = (
            self.chosen(known[0], early, late),
            self.chosen(known[1], early, late),
            self.chosen_keys(known[2], early, late),
            self.chosen_keys(known[3], early, late),
        )
        query, key = self.chosen(queries, early, late), self.chosen_keys(keys, early, late)
        more = self.whole(query, key, self.chosen_keys(values, early, late), mask, of_queries)
        return (
            self.shared(found[0], more[0], early, late),
            self.shared(found[1], more[1], early, late),
            self.shared(found[2], more[2], early, late),
        )

    def shared(self, pieces: Pieces, gradient: Tensor, early: Tensor, late: Tensor) -> Pieces:
        """The pieces with a gradient added to the one that was chosen; in order it is 0 where nothing is seen."""
        if not self.balanced:
            return (self.add(pieces[0], gradient),)
        of_early = self.mul(gradient, self.cast(early, gradient.dtype))
        of_late = self.mul(gradient, self.cast(late, gradient.dtype))
        return self.add(pieces[0], of_early), self.add(pieces[1], of_late)


class BlockAttention(nn.Cell):
    """The fused kernel for as many keys as queries, ``[batch, heads, tokens, d]``: statistics, and the context in fp32."""

    def __init__(self, mode: int, heads: int, scale: float) -> None:
        super().__init__()
        self.masked = mode != WHOLE_MASK
        self.flash_attention = P.operations.nn_ops.FlashAttentionScore(**options_of(mode, heads, scale))
        self.cast = P.Cast()

    def construct(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Statistics:
        hidden = mask if self.masked else None
        found = self.flash_attention(query, key, value, None, None, None, hidden, None)
        return found[0], found[1], self.cast(found[3], ms.float32)


class BlockGradient(Backward):
    """Gradients of query, key and value of :class:`BlockAttention`. ``known`` is of the queries and all keys they see: the
    gradient of the context, both statistics, and the context.
    """

    def __init__(self, mode: int, heads: int, scale: float) -> None:
        super().__init__()
        self.masked = mode != WHOLE_MASK
        self.flash_attention = FlashAttentionScoreGrad(**options_of(mode, heads, scale))

    def construct(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, known: Pieces
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, largest, total, context = known
        hidden = mask if self.masked else None
        found = self.flash_attention(
            query, key, value, gradient, None, None, None, hidden, largest, total, None, context, None
        )
        return found[0], found[1], found[2]


def options_of(mode: int, heads: int, scale: float) -> dict[str, int | float | str]:
    """Options of the kernel and of its gradient."""
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
    """Gives tensors to the next rank and returns those of the one before, in one exchange."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.concat = P.Concat()
        self.cut = P.Slice()
        self.reshape = P.Reshape()

    def split(self, group: str, place: int) -> None:
        """Makes it that of the rank at ``place`` in the ``group``."""
        self.following, self.previous = (place + 1) % self.ranks, (place - 1) % self.ranks
        self.exchange = P.AlltoAllV(group, 1)

    def construct(self, tensors: Pieces) -> Pieces:
        flat: Pieces = ()
        for tensor in tensors:
            flat = (*flat, self.reshape(tensor, (-1,)))
        joined = self.concat(flat)
        sent = only_of(self.ranks, self.following, joined.shape[0])
        arriving = only_of(self.ranks, self.previous, joined.shape[0])
        received = self.exchange(joined, sent, arriving)
        found: Pieces = ()
        start = 0
        for index in range(len(tensors)):
            count = flat[index].shape[0]
            found = (*found, self.reshape(self.cut(received, (start,), (count,)), tensors[index].shape))
            start = start + count
        return found


class PassOnBackward(Backward, PassOn):
    """:class:`PassOn` in the backward pass."""


def piece_of(known: tuple[Pieces, ...], number: int) -> Pieces:
    """What is known of one piece of queries."""
    return known[0][number], known[1][number], known[2][number], known[3][number]


def halves_of(tensors: Pieces) -> tuple[Pieces, Pieces]:
    """Of keys followed by as many values, both."""
    count = len(tensors) // 2
    return tensors[:count], tensors[count:]


@ms.constexpr
def numbers_of_steps(ranks: int) -> Tensor:
    """``0 … ranks - 1`` as int32 ``[ranks]``."""
    return Tensor(np.arange(ranks, dtype=np.int32))


@ms.constexpr
def only_of(ranks: int, rank: int, count: int) -> tuple[int, ...]:
    """Elements that are exchanged with each of the ranks: all with one."""
    return tuple(count if other == rank else 0 for other in range(ranks))
