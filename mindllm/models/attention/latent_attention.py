"""Multi-head latent attention (DeepSeek-V2, section 2.1) in the form of training: keys and values of all heads are made.

Queries and keys are the plain channels of a head, then those that rotary positions turn; the turned part of a key is one for all
heads. No tensor is cut: what published files hold in one matrix are several here.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import LATENT_NORM, LatentAttentionSpec
from mindllm.models.attention.attention import Tables, attention_core
from mindllm.models.attention.rotary import RotaryEmbedding
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Linear
from mindllm.models.norm import make_norm
from mindllm.models.weights import InitStd


class LatentAttention(nn.Cell):
    """Projections, rotation, attention and output projection: ``[batch · seq, hidden] -> [batch · seq, hidden]``."""

    biased = False

    def __init__(self, spec: LatentAttentionSpec, kernels: Kernels, spread: InitStd, seq_length: int) -> None:
        super().__init__()
        heads, std = spec.num_heads, spread.inner
        self.num_heads, self.value_dim = heads, spec.value_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = spec.qk_nope_head_dim, spec.qk_rope_head_dim
        self.compresses_queries = spec.q_lora_rank is not None
        if spec.q_lora_rank is None:
            self.wq_plain = Linear(spec.hidden_size, heads * spec.qk_nope_head_dim, kernels, std)
            self.wq_rotary = Linear(spec.hidden_size, heads * spec.qk_rope_head_dim, kernels, std)
        else:
            self.wq_down = Linear(spec.hidden_size, spec.q_lora_rank, kernels, std)
            self.wq_up_plain = Linear(spec.q_lora_rank, heads * spec.qk_nope_head_dim, kernels, std)
            self.wq_up_rotary = Linear(spec.q_lora_rank, heads * spec.qk_rope_head_dim, kernels, std)
        self.wkv_down = Linear(spec.hidden_size, spec.kv_lora_rank, kernels, std)
        self.wk_rotary = Linear(spec.hidden_size, spec.qk_rope_head_dim, kernels, std)
        self.wk_plain = Linear(spec.kv_lora_rank, heads * spec.qk_nope_head_dim, kernels, std)
        self.wv = Linear(spec.kv_lora_rank, heads * spec.value_dim, kernels, std)
        self.wo = Linear(heads * spec.value_dim, spec.hidden_size, kernels, spread.output)
        if spec.q_lora_rank is not None:
            self.query_latent_norm = make_norm(spec.q_lora_rank, LATENT_NORM, kernels)
        self.key_value_latent_norm = make_norm(spec.kv_lora_rank, LATENT_NORM, kernels)
        self.query_rotary = RotaryEmbedding(spec.qk_rope_head_dim, kernels)
        self.key_rotary = RotaryEmbedding(spec.qk_rope_head_dim, kernels)
        self.to_all_heads = P.Add()
        self.nothing = Tensor(np.zeros((1, heads, 1, 1)), kernels.activation)
        self.join_query = P.Concat(axis=-1)
        self.join_key = P.Concat(axis=-1)
        self.pads_values = kernels.flash_attention and spec.value_dim < spec.head_dim
        # Slices take no layout that names axes, as heads have it where devices share sequences: there tokens come before heads.
        self.pads_tokens = self.pads_values and kernels.sequence_ranks > 1
        if self.pads_values:
            self.padding = Padding(spec.head_dim - spec.value_dim)
            self.cut = P.Slice()
        self.attention = attention_core(spec, kernels, seq_length)
        self.reshape = P.Reshape()
        self.transpose = P.Transpose()
        self.merge_transpose = P.Transpose()

    def heads(self, x: Tensor, batch: int, width: int) -> Tensor:
        """``[batch · seq, heads · width] -> [batch, heads, seq, width]``."""
        return self.transpose(self.reshape(x, (batch, -1, self.num_heads, width)), (0, 2, 1, 3))

    def project(
        self, x: Tensor, batch: int, tables: Tables, random: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[batch, heads, seq, d]`` of ``x`` ``[batch · seq, hidden]``, each with its own ``d``.

        ``random`` has the keys of the adapters' dropout, here and below.
        """
        turned = self.turned_key(x, batch, tables, random)
        key, value = self.keys_and_values(self.narrow(x, random), turned, batch, random)
        return self.join_query(self.query(x, batch, tables, random)), key, value

    def narrow(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return the latent of keys and values, ``[batch · seq, kv_lora_rank]``."""
        return self.key_value_latent_norm(self.wkv_down(x, random))

    def turned_key(self, x: Tensor, batch: int, tables: Tables, random: Tensor | None = None) -> Tensor:
        """Return the rotated part of the keys, which all heads share: ``[batch, 1, seq, rotated]``."""
        key = self.reshape(self.wk_rotary(x, random), (batch, 1, -1, self.qk_rope_head_dim))
        return self.key_rotary(key, tables[0], tables[1])

    def keys_and_values(
        self, narrow: Tensor, turned: Tensor, batch: int, random: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads, ``[batch, heads, seq, d]``, from :meth:`narrow` and :meth:`turned_key`."""
        turned = self.to_all_heads(turned, self.nothing)
        key = self.join_key((self.heads(self.wk_plain(narrow, random), batch, self.qk_nope_head_dim), turned))
        value = self.wv(narrow, random)
        if not self.pads_tokens:
            return key, self.heads(value, batch, self.value_dim)
        padded = self.padding(self.reshape(value, (batch, -1, self.num_heads, self.value_dim)))
        return key, self.transpose(padded, (0, 2, 1, 3))

    def query(self, x: Tensor, batch: int, tables: Tables, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the plain and the rotated part of queries, ``[batch, heads, seq, d]``."""
        if self.compresses_queries:
            latent = self.query_latent_norm(self.wq_down(x, random))
            plain, turned = self.wq_up_plain(latent, random), self.wq_up_rotary(latent, random)
        else:
            plain, turned = self.wq_plain(x, random), self.wq_rotary(x, random)
        turned = self.query_rotary(self.heads(turned, batch, self.qk_rope_head_dim), tables[0], tables[1])
        return self.heads(plain, batch, self.qk_nope_head_dim), turned

    def output(self, context: Tensor, random: Tensor | None = None) -> Tensor:
        """``[batch, heads, seq, value] -> [batch · seq, hidden]``."""
        merged = self.merge_transpose(context, (0, 2, 1, 3))
        if self.pads_tokens:
            merged = self.without_padding(merged)
        return self.wo(self.reshape(merged, (-1, self.num_heads * self.value_dim)), random)

    def construct(self, x: Tensor, batch: int, tables: Tables, mask: Tensor, random: Tensor | None = None) -> Tensor:
        query, key, value = self.project(x, batch, tables, random)
        if self.pads_tokens or not self.pads_values:
            return self.output(self.attention(query, key, value, mask, None, random), random)
        context = self.attention(query, key, self.padding(value), mask)
        return self.output(self.without_padding(context), random)

    def without_padding(self, x: Tensor) -> Tensor:
        """Return the channels of values."""
        return self.cut(x, (0, 0, 0, 0), (x.shape[0], x.shape[1], x.shape[2], self.value_dim))


class Padding(nn.Cell):
    """Appends ``count`` zeros to the channels: the fused kernel has one width for keys and values."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.zeros = Tensor(np.zeros((1, 1, 1, count)), ms.float32)
        self.spread = P.Mul()
        self.first = P.Slice()
        self.concat = P.Concat(axis=-1)
        self.cast = P.Cast()

    def construct(self, x: Tensor) -> Tensor:
        column = self.first(x, (0, 0, 0, 0), (x.shape[0], x.shape[1], x.shape[2], 1))
        return self.concat((x, self.spread(column, self.cast(self.zeros, x.dtype))))
