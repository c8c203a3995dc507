"""Causal self-attention with grouped queries (Ainslie et al., 2023): composed for every back end, fused on Ascend."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import AlibiSpec, AttentionSpec, LatentAttentionSpec, RotarySpec, causal_blocks
from mindllm.models.attention.alibi import alibi_bias
from mindllm.models.attention.flash_attention import BalancedFlashAttention, FlashAttention
from mindllm.models.attention.largest_logit import LargestLogit
from mindllm.models.attention.ring_attention import RingAttention
from mindllm.models.attention.rotary import RotaryEmbedding
from mindllm.models.cpu_broadcast import TileToShape
from mindllm.models.dropout import AttentionDropout
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Linear, Operand, SoftCap
from mindllm.models.norm import make_norm
from mindllm.models.pieces import EarlierPieces
from mindllm.models.weights import InitStd, constant

ATTENTION_SALT = 1  # of the random numbers of dropout
Tables = tuple[Tensor, ...]
"""Position tables of all layers of a context: rotary cosines and sines, or nothing. For a piece of a sequence: cosines, sines, a
mask of its places, and its number."""
AnyAttention = AttentionSpec | LatentAttentionSpec


class ComposedAttention(nn.Cell):
    """``softmax(scale · q kᵀ + mask) v`` from matrix products, with ALiBi's bias, a soft cap and dropout as specified.

    Query heads that share a key head are laid along the sequence axis: grouped attention needs no copies of keys and values.
    """

    def __init__(self, spec: AnyAttention, kernels: Kernels, seq_length: int) -> None:
        super().__init__()
        self.scale = spec.scale
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.value_dim = spec.value_dim
        self.softmax_dtype = kernels.softmax
        self.masks_of_rows = kernels.document_masks
        self.biased = isinstance(spec.position, AlibiSpec)
        if self.biased:
            self.add_bias = P.Add()
        self.watched = kernels.watches_logits
        if self.watched:
            self.largest = LargestLogit(spec.num_heads)
        self.capped = spec.soft_cap is not None
        if spec.soft_cap is not None:
            self.soft_cap = SoftCap(spec.soft_cap)
        self.drops = spec.dropout > 0
        if self.drops:
            self.dropout = AttentionDropout(spec.dropout, spec.num_heads, seq_length, ATTENTION_SALT, not kernels.cpu)
        self.repeats = kernels.same_shapes and kernels.softmax == ms.float32
        if self.repeats:
            self.repeated = TileToShape()
        self.output_dtype = kernels.activation
        self.reshape = P.Reshape()
        self.scores = P.BatchMatMul(transpose_b=True)
        self.mul = P.Mul()
        self.add = P.Add()
        self.softmax = P.Softmax(axis=-1)
        self.context = P.BatchMatMul()
        self.cast = P.Cast()
        self.operand = Operand(kernels)

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor:
        """Query ``[batch, heads, q, d]``, key, value ``[batch, num_kv_heads, k, d]`` -> as query, with the width of the values.

        The mask is additive: ``[q, k]``, or ``[batch, 1, q, k]`` with one for each row. The bias is ``[1, heads, 1, k]``.
        ``random``, int32 ``[batch, q]``, has the keys of dropout.
        """
        columns = self.dropout.columns if self.drops else None
        return self.attend(self.mul(query, self.scale), key, value, mask, bias, random, columns)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        bias: Tensor | None,
        random: Tensor | None,
        dropout_columns: Tensor | None,
    ) -> Tensor:
        """Compute the attention of a scaled query. Shapes are those of :meth:`construct`."""
        batch, _, rows, _ = query.shape
        columns = key.shape[2]
        query = self.reshape(query, (batch, self.num_kv_heads, -1, self.head_dim))
        scores = self.scores(self.operand(query), self.operand(key))
        scores = self.reshape(scores, (batch, self.num_heads, rows, columns))
        scores = self.cast(scores, self.softmax_dtype)
        if self.capped:
            scores = self.soft_cap(scores)
        if self.biased:
            scores = self.add_bias(scores, self.cast(bias, self.softmax_dtype))
        mask = self.cast(mask, self.softmax_dtype)
        scores = self.add(scores, self.repeated(mask, scores.shape) if self.repeats and mask.ndim == 2 else mask)
        if self.watched:
            scores = self.largest(scores, scores)
        weights = self.cast(self.normalised(scores), self.output_dtype)
        if self.drops:
            weights = self.reshape(weights, (batch, self.num_heads, rows, columns))
            weights = self.dropout(weights, random, dropout_columns)
        weights = self.operand(weights)
        weights = self.reshape(weights, (batch, self.num_kv_heads, -1, columns))
        context = self.context(weights, self.operand(value))
        return self.reshape(context, (batch, self.num_heads, rows, self.value_dim))

    def normalised(self, scores: Tensor) -> Tensor:
        return self.softmax(scores)


class CausalAttention(ComposedAttention):
    """:class:`ComposedAttention` under a causal mask ``[seq, seq]`` on a CPU, in blocks of query rows.

    A block only uses the keys up to its own end, so that most of the masked half is not computed.
    """

    def __init__(self, spec: AnyAttention, kernels: Kernels, seq_length: int) -> None:
        super().__init__(spec, kernels, seq_length)
        self.slice = P.Slice()
        self.concat = P.Concat(axis=2)

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor:
        """Compute attention with as many queries as keys. Shapes are those of :class:`ComposedAttention`."""
        query = self.mul(query, self.scale)
        length = query.shape[2]
        blocks = causal_blocks(length)
        parts: tuple[Tensor, ...] = ()
        for index in range(blocks):
            start, end = length * index // blocks, length * (index + 1) // blocks
            rows = self.cut(query, start, end)
            block_mask = self.cut_mask(mask, start, end)
            keys, values = self.cut(key, 0, end), self.cut(value, 0, end)
            block_bias = self.slice(bias, (0, 0, 0, 0), (1, self.num_heads, 1, end)) if self.biased else None
            block_random = (
                self.slice(random, (0, start), (random.shape[0], end - start)) if random is not None else None
            )
            columns = self.slice(self.dropout.columns, (0, 0, 0, 0), (1, 1, 1, end)) if self.drops else None
            parts = (*parts, self.attend(rows, keys, values, block_mask, block_bias, block_random, columns))
        return parts[0] if blocks == 1 else self.concat(parts)

    def cut_mask(self, mask: Tensor, start: int, end: int) -> Tensor:
        """Rows ``start … end - 1`` of a mask, over the keys up to their end."""
        if mask.ndim == 2:
            return self.slice(mask, (start, 0), (end - start, end))
        return self.slice(mask, (0, 0, start, 0), (mask.shape[0], 1, end - start, end))

    def cut(self, x: Tensor, start: int, end: int) -> Tensor:
        """Positions ``start … end - 1`` of ``[batch, heads, seq, d]``."""
        batch, heads, length, width = x.shape
        if end - start == length:
            return x
        return self.slice(x, (0, 0, start, 0), (batch, heads, end - start, width))

    def normalised(self, scores: Tensor) -> Tensor:
        """Normalize the scores as a matrix: the CPU back end's reductions are slow over more dimensions."""
        return self.softmax(self.reshape(scores, (-1, scores.shape[-1])))


class Attention(nn.Cell):
    """Projections, rotation, attention and output projection: ``[batch · seq, hidden] -> [batch · seq, hidden]``."""

    def __init__(self, spec: AttentionSpec, kernels: Kernels, spread: InitStd, seq_length: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.wq = Linear(spec.hidden_size, width, kernels, spread.inner, bias=spec.qkv_bias)
        self.wk = Linear(spec.hidden_size, kv_width, kernels, spread.inner, bias=spec.qkv_bias)
        self.wv = Linear(spec.hidden_size, kv_width, kernels, spread.inner, bias=spec.qkv_bias)
        self.wo = Linear(width, spec.hidden_size, kernels, spread.output, bias=spec.out_bias)
        self.norms_heads = spec.query_key_norm is not None
        if spec.query_key_norm is not None:
            self.query_norm = make_norm(spec.head_dim, spec.query_key_norm, kernels)
            self.key_norm = make_norm(spec.head_dim, spec.query_key_norm, kernels)
        self.rotates = isinstance(spec.position, RotarySpec)
        if self.rotates:
            self.rotary = RotaryEmbedding(spec.head_dim, kernels)
        self.biased = isinstance(spec.position, AlibiSpec)
        if (
            self.biased
        ):  # every layer's own: one of the decoder is not cut by heads in all layers that MindSpore 2.10 compiles
            self.alibi_bias = constant("alibi_bias", alibi_bias(spec.num_heads, seq_length))
        self.attention = attention_core(spec, kernels, seq_length)
        self.reshape = P.Reshape()
        self.transpose = P.Transpose()
        self.merge_transpose = P.Transpose()
        self.in_pieces = kernels.pieces is not None
        if kernels.pieces is not None:
            cache = (kernels.pieces, self.num_kv_heads, seq_length, self.head_dim, kernels.activation)
            self.key_cache, self.value_cache = EarlierPieces(*cache), EarlierPieces(*cache)

    def heads(self, x: Tensor, batch: int, count: int) -> Tensor:
        """``[batch · seq, count · d] -> [batch, count, seq, d]``."""
        return self.transpose(self.reshape(x, (batch, -1, count, self.head_dim)), (0, 2, 1, 3))

    def project(
        self, x: Tensor, batch: int, tables: Tables, random: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries and keys, and values, of ``x`` ``[batch · seq, hidden]``: ``[batch, heads, seq, d]``."""
        query = self.queries(self.wq(x, random), batch, tables)
        key = self.keys(self.wk(x, random), batch, tables)
        return query, key, self.heads(self.wv(x, random), batch, self.num_kv_heads)

    def queries(self, rows: Tensor, batch: int, tables: Tables) -> Tensor:
        """Normed and rotated heads ``[batch, heads, seq, d]`` of ``rows`` ``[batch · seq, heads · d]``."""
        query = self.heads(rows, batch, self.num_heads)
        if self.norms_heads:
            query = self.query_norm(query)
        return self.rotary(query, tables[0], tables[1]) if self.rotates else query

    def keys(self, rows: Tensor, batch: int, tables: Tables) -> Tensor:
        """Split rows of keys into heads, normalize and rotate them. Shapes are those of :meth:`queries`."""
        key = self.heads(rows, batch, self.num_kv_heads)
        if self.norms_heads:
            key = self.key_norm(key)
        return self.rotary(key, tables[0], tables[1]) if self.rotates else key

    def merged(self, context: Tensor) -> Tensor:
        """``[batch, heads, seq, d] -> [batch · seq, heads · d]``."""
        return self.reshape(self.merge_transpose(context, (0, 2, 1, 3)), (-1, self.num_heads * self.head_dim))

    def output(self, context: Tensor, random: Tensor | None = None) -> Tensor:
        """``[batch, heads, seq, d] -> [batch · seq, hidden]``."""
        return self.wo(self.merged(context), random)

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of any rows ``[rows, hidden]``, as they are projected: ``[rows, heads · d]``."""
        return self.wq(x), self.wk(x), self.wv(x)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, batch: int, tables: Tables, mask: Tensor) -> Tensor:
        """Compute attention of the :meth:`rows` of whole sequences before the output projection: ``[batch · seq, heads · d]``."""
        query, key = self.queries(query, batch, tables), self.keys(key, batch, tables)
        value = self.heads(value, batch, self.num_kv_heads)
        return self.merged(self.attention(query, key, value, mask, self.bias(), None))

    def bias(self) -> Tensor | None:
        """ALiBi's ``[1, heads, 1, seq]``; None without."""
        return self.alibi_bias if self.biased else None

    def construct(self, x: Tensor, batch: int, tables: Tables, mask: Tensor, random: Tensor | None = None) -> Tensor:
        query, key, value = self.project(x, batch, tables, random)
        if self.in_pieces:
            places, piece = tables[2], tables[3]
            key, saved_keys = self.key_cache(key, places, piece)
            value, saved_values = self.value_cache(value, places, piece)
            query = P.depend(P.depend(query, saved_keys), saved_values)
        context = self.attention(query, key, value, mask, self.bias(), random)
        return self.output(context, random)


def attention_core(spec: AnyAttention, kernels: Kernels, seq_length: int) -> nn.Cell:
    """Return causal attention of heads in the form that is fastest on the device."""
    if kernels.ring:
        return RingAttention(spec, kernels)
    if kernels.balanced:
        return BalancedFlashAttention(spec, kernels, seq_length)
    if kernels.flash_attention:
        return FlashAttention(spec, kernels, seq_length)
    return (CausalAttention if kernels.cpu else ComposedAttention)(spec, kernels, seq_length)
