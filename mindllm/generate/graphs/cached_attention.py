"""Attention of new tokens to the cache: as in training, or of latent attention to vectors that stay compressed.

A score of latent attention is ``q · (W_k c)`` for the narrow vector ``c`` of a token, which is ``(W_kᵀ q) · c``; and what a head
sees is ``Σ w (W_v c) = W_v Σ w c`` (DeepSeek-V2, section 2.1.2). So keys and values need not exist: the cache has ``c`` and the
key that is turned, and queries of all heads attend to these as to one key head.
"""

from __future__ import annotations

from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec
from mindllm.generate.graphs.layer_cache import FirstOfCache, LayerCache
from mindllm.models import Kernels
from mindllm.models.attention.attention import Attention, ComposedAttention, Tables
from mindllm.models.attention.latent_attention import LatentAttention
from mindllm.models.linear import Operand

Cache = LayerCache | FirstOfCache
NEVER = 1 << 31  # tokens, more than there are


class WholeAttention(nn.Cell):
    """Attention as in training, to whole keys and values: ``[batch · tokens, hidden] -> [batch · tokens, hidden]``."""

    def __init__(
        self, attention: Attention, spec: AttentionSpec, cache: Cache, kernels: Kernels, capacity: int
    ) -> None:
        super().__init__(auto_prefix=False)
        self.attention = attention
        self.cache = cache
        self.core = ComposedAttention(spec, kernels, capacity)
        self.batch = cache.shape[0]

    def construct(self, x: Tensor, slots: Tensor, tables: Tables, mask: Tensor) -> Tensor:
        query, key, value = self.attention.project(x, self.batch, tables)
        keys, values = self.cache(slots, key, value)
        context = self.core(query, keys, values, mask, tables[0] if self.attention.biased else None)
        return self.attention.output(context)


class CompressedAttention(nn.Cell):
    """Latent attention to narrow vectors: ``[batch · tokens, hidden] -> [batch · tokens, hidden]``.

    Few tokens take their queries to the vectors. For many it is less work to make keys and values of all vectors.
    """

    def __init__(
        self, attention: LatentAttention, spec: LatentAttentionSpec, cache: Cache, kernels: Kernels, capacity: int
    ) -> None:
        super().__init__(auto_prefix=False)
        self.attention = attention
        self.cache = cache
        self.spec = spec
        self.batch = cache.shape[0]
        self.capacity = capacity
        self.tokens_for_keys = tokens_for_keys(spec)
        self.absorbed_core = ComposedAttention(absorbed(spec), kernels, capacity)
        self.core = ComposedAttention(spec, kernels, capacity)
        self.of_keys = OfHeads(kernels, transposed=False)
        self.of_values = OfHeads(kernels, transposed=True)
        self.join_narrow = P.Concat(axis=-1)
        self.join_query = P.Concat(axis=-1)
        self.cut = P.Slice()
        self.reshape = P.Reshape()

    def construct(self, x: Tensor, slots: Tensor, tables: Tables, mask: Tensor) -> Tensor:
        attention = self.attention
        narrow = self.reshape(attention.narrow(x), (self.batch, 1, -1, self.spec.kv_lora_rank))
        held, _ = self.cache(slots, self.join_narrow((narrow, attention.turned_key(x, self.batch, tables))))
        plain, turned = attention.query(x, self.batch, tables)
        if plain.shape[2] >= self.tokens_for_keys:
            return attention.output(self.to_keys(plain, turned, held, mask))
        return attention.output(self.to_vectors(plain, turned, held, mask))

    def to_vectors(self, plain: Tensor, turned: Tensor, held: Tensor, mask: Tensor) -> Tensor:
        """What heads see, ``[batch, heads, tokens, value]``, of the cache ``[batch, 1, capacity, narrow + turned]``."""
        spec, attention = self.spec, self.attention
        query = self.join_query((self.of_keys(plain, attention.wk_plain.matrix(plain)), turned))
        seen = self.absorbed_core(query, held, held, mask)
        seen = self.cut(seen, (0, 0, 0, 0), (*seen.shape[:3], spec.kv_lora_rank))
        return self.of_values(seen, attention.wv.matrix(seen))

    def to_keys(self, plain: Tensor, turned: Tensor, held: Tensor, mask: Tensor) -> Tensor:
        """The same by keys and values of all heads."""
        rank, places = self.spec.kv_lora_rank, (self.batch, 1, self.capacity)
        narrow = self.reshape(self.cut(held, (0, 0, 0, 0), (*places, rank)), (-1, rank))
        turned_keys = self.cut(held, (0, 0, 0, rank), (*places, self.spec.qk_rope_head_dim))
        keys, values = self.attention.keys_and_values(narrow, turned_keys, self.batch)
        return self.core(self.join_query((plain, turned)), keys, values, mask)


class OfHeads(nn.Cell):
    """Multiplies every head by its part of a weight: ``[batch, heads, tokens, in] -> [batch, heads, tokens, out]``.

    The weight is ``[heads · in, out]``, ``transposed``: ``[heads · out, in]``.
    """

    def __init__(self, kernels: Kernels, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.matmul = P.BatchMatMul(transpose_b=transposed)
        self.operand = Operand(kernels)
        self.transpose = P.Transpose()
        self.reshape = P.Reshape()

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        batch, heads, tokens, width = x.shape
        weight = self.reshape(self.operand(weight), (heads, -1, weight.shape[1]))
        x = self.reshape(self.transpose(self.operand(x), (1, 0, 2, 3)), (heads, batch * tokens, width))
        y = self.reshape(self.matmul(x, weight), (heads, batch, tokens, -1))
        return self.transpose(y, (1, 0, 2, 3))


def absorbed(spec: LatentAttentionSpec) -> AttentionSpec:
    """Latent attention as queries see it that are taken to the narrow vectors: one key head, whose values are the keys."""
    width = spec.kv_lora_rank + spec.qk_rope_head_dim
    return AttentionSpec(spec.hidden_size, spec.num_heads, 1, width, spec.scale, spec.position)


def tokens_for_keys(spec: LatentAttentionSpec) -> int:
    """The fewest tokens for which keys and values of all vectors cost fewer multiplications than queries taken to the vectors.

    A query and a vector cost ``2 (rank + turned)`` for each head then, and ``plain + turned + value`` with keys and values, which
    take ``rank (plain + value)`` for each vector.
    """
    saved = 2 * (spec.kv_lora_rank + spec.qk_rope_head_dim) - spec.head_dim - spec.value_dim
    return spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.value_dim) // saved + 1 if saved > 0 else NEVER
