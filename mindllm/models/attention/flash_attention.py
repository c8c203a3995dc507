"""Attention by the fused kernel of Ascend (Dao, 2023), for whole sequences and for sequences in balanced halves."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec
from mindllm.models.attention.largest_logit import LargestLogit
from mindllm.models.kernels import Kernels

# Values of sparse_mode.
FULL_MASK = 0
CAUSAL_BY_COMPRESSED_MASK = 2  # the mask is 2048 x 2048 whatever the length, the upper triangle is skipped
BAND_BY_COMPRESSED_MASK = 4  # additionally skips keys more than pre_tokens back

ROW_MAXIMA, CONTEXT = 0, 3
"""Outputs of the operator: the largest scaled and masked score of each query, fp32 ``[batch, heads, seq, 8]`` with eight equal
numbers, and the context of the queries.
"""


class FlashAttention(nn.Cell):
    """The fused kernel: shapes of :class:`mindllm.models.attention.attention.ComposedAttention`, uint8 mask with 1 = masked."""

    def __init__(self, spec: AttentionSpec | LatentAttentionSpec, kernels: Kernels, seq_length: int) -> None:
        super().__init__()
        self.masks_of_rows = kernels.document_masks
        mode, band = CAUSAL_BY_COMPRESSED_MASK, {}
        if kernels.document_masks:
            mode = FULL_MASK
        elif spec.window is not None and spec.window < seq_length:
            mode, band = BAND_BY_COMPRESSED_MASK, {"pre_tokens": spec.window - 1, "next_tokens": 0}
        self.flash_attention = flash_attention_score(spec, mode, **band)
        self.watched = kernels.watches_logits
        if self.watched:
            self.largest = LargestLogit(spec.num_heads)

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor:
        outputs = self.flash_attention(query, key, value, None, None, None, mask, None)
        return self.largest(outputs[CONTEXT], outputs[ROW_MAXIMA]) if self.watched else outputs[CONTEXT]


class BalancedFlashAttention(nn.Cell):
    """Causal attention of tokens in :func:`.balanced_order` of a sequence, shapes of :class:`FlashAttention`.

    The early half of a sequence is in order: its queries see the early keys before them. The late half is reversed: a query sees
    the late keys after it and all early ones, which is one band of the late keys followed by the early ones. Both halves
    therefore have compressed masks without computing masked scores, and a device with a piece of each half has as many scores as
    any other.
    """

    masks_of_rows = False

    def __init__(self, spec: AttentionSpec | LatentAttentionSpec, kernels: Kernels, seq_length: int) -> None:
        super().__init__()
        self.ranks = kernels.sequence_ranks
        self.piece = seq_length // (2 * self.ranks)
        self.split_query = P.Split(axis=3, output_num=2)
        self.split_key = P.Split(axis=3, output_num=2)
        self.split_value = P.Split(axis=3, output_num=2)
        self.join_keys = P.Concat(axis=2)
        self.join_values = P.Concat(axis=2)
        self.join = P.Concat(axis=3)
        self.reshape = P.Reshape()
        self.early = flash_attention_score(spec, CAUSAL_BY_COMPRESSED_MASK)
        diagonal = seq_length // 2  # a band is counted from the last query and key
        self.late = flash_attention_score(spec, BAND_BY_COMPRESSED_MASK, pre_tokens=diagonal, next_tokens=seq_length)
        self.watched = kernels.watches_logits
        if self.watched:
            self.largest = LargestLogit(spec.num_heads)

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor:
        early, late = self.split_query(self.in_pieces(query))
        early_keys, late_keys = self.split_key(self.in_pieces(key))
        early_values, late_values = self.split_value(self.in_pieces(value))
        early_keys, early_values = self.half(early_keys), self.half(early_values)
        keys = self.join_keys((self.half(late_keys), early_keys))
        values = self.join_values((self.half(late_values), early_values))
        early_outputs = self.early(self.half(early), early_keys, early_values, None, None, None, mask, None)
        late_outputs = self.late(self.half(late), keys, values, None, None, None, mask, None)
        first, second = early_outputs[CONTEXT], late_outputs[CONTEXT]
        if self.watched:
            first = self.largest(first, early_outputs[ROW_MAXIMA])
            second = self.largest(second, late_outputs[ROW_MAXIMA])
        return self.reshape(self.join((self.in_halves(first), self.in_halves(second))), query.shape)

    def in_pieces(self, x: Tensor) -> Tensor:
        """``[batch, heads, seq, d] -> [batch, heads, ranks, 2, piece, d]``."""
        batch, heads, _, width = x.shape
        return self.reshape(x, (batch, heads, self.ranks, 2, self.piece, width))

    def half(self, x: Tensor) -> Tensor:
        """``[batch, heads, ranks, 1, piece, d] -> [batch, heads, seq / 2, d]``."""
        return self.reshape(x, (x.shape[0], x.shape[1], self.ranks * self.piece, x.shape[5]))

    def in_halves(self, x: Tensor) -> Tensor:
        """Invert :meth:`half`."""
        return self.reshape(x, (x.shape[0], x.shape[1], self.ranks, 1, self.piece, x.shape[3]))


def flash_attention_score(spec: AttentionSpec | LatentAttentionSpec, mode: int, **band: int) -> P.Primitive:
    """Return the operator for ``[batch, heads, seq, d]``; ``mode`` is its ``sparse_mode``."""
    return ms.ops.operations.nn_ops.FlashAttentionScore(
        head_num=spec.num_heads,
        keep_prob=1.0,
        scale_value=spec.scale,
        input_layout="BNSD",
        sparse_mode=mode,
        **band,
    )
