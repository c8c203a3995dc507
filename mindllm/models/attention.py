"""Causal self-attention with grouped queries (Ainslie et al., 2023): composed for every back end, fused on Ascend."""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.models.kernels import DTYPES, Kernels
from mindllm.models.linear import Linear, Operand
from mindllm.models.rotary import RotaryEmbedding


class ComposedAttention(nn.Cell):
    """``softmax(q kᵀ / sqrt(d) + mask) v`` from matrix products.

    Query heads that share a key head are laid along the sequence axis: grouped attention needs no copies of keys and values.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(model.head_dim)
        self.num_heads = model.num_heads
        self.kv_heads = model.n_kv_heads
        self.head_dim = model.head_dim
        self.softmax_dtype = DTYPES[model.softmax_compute_type]
        self.output_dtype = kernels.activation
        self.reshape = P.Reshape()
        self.scores = P.BatchMatMul(transpose_b=True)
        self.mul = P.Mul()
        self.add = P.Add()
        self.softmax = P.Softmax(axis=-1)
        self.context = P.BatchMatMul()
        self.cast = P.Cast()
        self.operand = Operand(kernels)

    def construct(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Query ``[batch, heads, q, d]``, key, value ``[batch, kv_heads, k, d]`` -> as query.

        The mask is additive: ``[q, k]``, or ``[batch, 1, q, k]`` with one for each row.
        """
        return self.attend(self.mul(query, self.scale), key, value, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """The same for a query that is scaled already."""
        batch, _, rows, _ = query.shape
        columns = key.shape[2]
        query = self.reshape(query, (batch, self.kv_heads, -1, self.head_dim))
        scores = self.scores(self.operand(query), self.operand(key))
        scores = self.reshape(scores, (batch, self.num_heads, rows, columns))
        scores = self.add(self.cast(scores, self.softmax_dtype), self.cast(mask, self.softmax_dtype))
        weights = self.operand(self.cast(self.normalised(scores), self.output_dtype))
        weights = self.reshape(weights, (batch, self.kv_heads, -1, columns))
        context = self.context(weights, self.operand(value))
        return self.reshape(context, (batch, self.num_heads, rows, self.head_dim))

    def normalised(self, scores: Tensor) -> Tensor:
        return self.softmax(scores)


class CausalAttention(ComposedAttention):
    """:class:`ComposedAttention` under a causal mask ``[seq, seq]`` on a CPU, in blocks of query rows.

    A block sees the keys up to its own end: of the half that the mask would hide, most is not computed. Slices of the key
    and value cost less than what is saved as long as blocks are large, hence four at most.
    """

    SMALLEST_BLOCK = 128
    MOST_BLOCKS = 4

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__(model, kernels)
        self.slice = P.Slice()
        self.concat = P.Concat(axis=2)

    def construct(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """As :class:`ComposedAttention`, with as many queries as keys."""
        query = self.mul(query, self.scale)
        length = query.shape[2]
        blocks = min(self.MOST_BLOCKS, max(1, length // self.SMALLEST_BLOCK))
        parts: tuple[Tensor, ...] = ()
        for index in range(blocks):
            start, end = length * index // blocks, length * (index + 1) // blocks
            rows = self.cut(query, start, end)
            part_of_mask = self.cut_mask(mask, start, end)
            parts = (*parts, self.attend(rows, self.cut(key, 0, end), self.cut(value, 0, end), part_of_mask))
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
        """As a matrix: the CPU back end's reductions, of which the gradient has one, are slow over more dimensions."""
        return self.softmax(self.reshape(scores, (-1, scores.shape[-1])))


class FlashAttention(nn.Cell):
    """The fused kernel of Ascend (Dao, 2023): shapes of :class:`ComposedAttention`, uint8 mask with 1 = masked."""

    # Values of sparse_mode.
    WHOLE_MASK = 0
    CAUSAL_BY_COMPRESSED_MASK = 2  # the mask is 2048 x 2048 whatever the length, the upper triangle is skipped

    def __init__(self, model: ModelConfig, document_masks: bool) -> None:
        super().__init__()
        self.flash_attention = ms.ops.operations.nn_ops.FlashAttentionScore(
            head_num=model.num_heads,
            keep_prob=1.0,
            scale_value=1.0 / math.sqrt(model.head_dim),
            input_layout="BNSD",
            sparse_mode=self.WHOLE_MASK if document_masks else self.CAUSAL_BY_COMPRESSED_MASK,
        )

    def construct(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return self.flash_attention(query, key, value, None, None, None, mask, None)[3]


class Attention(nn.Cell):
    """Projections, rotation, attention and output projection: ``[batch · seq, hidden] -> [batch · seq, hidden]``."""

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.num_heads = model.num_heads
        self.kv_heads = model.n_kv_heads
        width, kv_width = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        std = model.initializer_range
        self.wq = Linear(model.hidden_size, width, kernels, std, bias=model.qkv_has_bias)
        self.wk = Linear(model.hidden_size, kv_width, kernels, std, bias=model.qkv_has_bias)
        self.wv = Linear(model.hidden_size, kv_width, kernels, std, bias=model.qkv_has_bias)
        out_std = std / math.sqrt(2 * model.num_layers)
        self.wo = Linear(width, model.hidden_size, kernels, out_std, bias=model.attn_proj_has_bias)
        self.rotary = RotaryEmbedding(model, kernels)
        self.attention = attention_core(model, kernels)
        self.reshape = P.Reshape()
        self.transpose = P.Transpose()
        self.merge_transpose = P.Transpose()

    def heads(self, x: Tensor, batch: int, count: int) -> Tensor:
        """``[batch · seq, count · d] -> [batch, count, seq, d]``."""
        return self.transpose(self.reshape(x, (batch, -1, count, self.head_dim)), (0, 2, 1, 3))

    def project(self, x: Tensor, batch: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, of ``x`` ``[batch · seq, hidden]``, each ``[batch, heads, seq, d]``."""
        query = self.rotary(self.heads(self.wq(x), batch, self.num_heads), cos, sin)
        key = self.rotary(self.heads(self.wk(x), batch, self.kv_heads), cos, sin)
        return query, key, self.heads(self.wv(x), batch, self.kv_heads)

    def output(self, context: Tensor) -> Tensor:
        """``[batch, heads, seq, d] -> [batch · seq, hidden]``."""
        merged = self.merge_transpose(context, (0, 2, 1, 3))
        return self.wo(self.reshape(merged, (-1, self.num_heads * self.head_dim)))

    def construct(self, x: Tensor, batch: int, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(x, batch, cos, sin)
        return self.output(self.attention(query, key, value, mask))


def attention_core(model: ModelConfig, kernels: Kernels) -> nn.Cell:
    """Causal attention of heads, in the form the device is good at."""
    if kernels.flash_attention:
        return FlashAttention(model, kernels.document_masks)
    return CausalAttention(model, kernels) if kernels.cpu else ComposedAttention(model, kernels)
