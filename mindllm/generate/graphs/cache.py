"""The decoder that reads and extends a static key/value cache: one graph per number of tokens given at once.

Prefill and decode are the same cell on ``[batch, tokens]`` of different widths: the prompt padded to a bucket, then one token
a step. All shapes are static; where a token stands is data, so rows of a batch may be of different lengths.

New tokens attend to the cache as in training, or with latent attention to vectors that stay compressed. A score of latent
attention is ``q · (W_k c)`` for the narrow vector ``c`` of a token, which is ``(W_kᵀ q) · c``; and what a head sees is ``Σ w
(W_v c) = W_v Σ w c`` (DeepSeek-V2, section 2.1.2). So keys and values need not exist: the cache has ``c`` and the key that is
turned, and queries of all heads attend to these as to one key head.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, nn
from mindspore import ops as P

from mindllm.architecture.parts import AlibiSpec, AttentionContext, AttentionSpec, LatentAttentionSpec, RotarySpec
from mindllm.architecture.rotary_tables import rotary_tables
from mindllm.config import ModelConfig
from mindllm.generate.graphs.layer_cache import CacheForm, FirstOfCache, LayerCache
from mindllm.models import CausalLM, Kernels
from mindllm.models.attention.alibi import alibi_bias
from mindllm.models.attention.attention import Attention, ComposedAttention, Tables
from mindllm.models.attention.latent_attention import LatentAttention
from mindllm.models.decoder import MASKED
from mindllm.models.decoder_layer import DecoderLayer
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


ATTENTIONS = {AttentionSpec: WholeAttention, LatentAttentionSpec: CompressedAttention}


class CachedLayer(nn.Cell):
    """A decoder layer whose tokens attend to the cache: ``[batch · tokens, hidden] -> [batch · tokens, hidden]``."""

    @lazy_inline(policy="front")
    def __init__(self, layer: DecoderLayer, attention: WholeAttention | CompressedAttention) -> None:
        super().__init__(auto_prefix=False)
        self.layer = layer
        self.attention = attention
        self.cache = attention.cache
        self.batch = attention.batch

    def construct(self, x: Tensor, slots: Tensor, tables: Tables, mask: Tensor) -> Tensor:
        layer = self.layer
        attended = self.attention(layer.attention_norm(x), slots, tables, mask)
        x = layer.after_feed_forward(layer.after_attention(x, attended), self.batch, may_drop=False)
        return x[0] if layer.adds_to_loss else x


class CachedContext(nn.Cell):
    """The tables and the mask of one context of layers, for tokens at any positions of the cache.

    ``longest``: the sequence length the model was built for; the cache may have room for more.
    """

    def __init__(self, context: AttentionContext, capacity: int, longest: int, suffix: str) -> None:
        super().__init__()
        self.rotates = isinstance(context.position, RotarySpec)
        self.biased = isinstance(context.position, AlibiSpec)
        if isinstance(context.position, RotarySpec):
            cos, sin = rotary_tables(context.position, context.head_dim, capacity, longest)
            self.cos = Parameter(Tensor(cos), name=f"cache.cos{suffix}", requires_grad=False)
            self.sin = Parameter(Tensor(sin), name=f"cache.sin{suffix}", requires_grad=False)
        if self.biased:
            bias = alibi_bias(context.num_heads, capacity)
            self.bias = Parameter(Tensor(bias), name=f"cache.bias{suffix}", requires_grad=False)
        self.window = context.window if context.window is not None and context.window < capacity else 0
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.columns = Tensor(np.arange(capacity, dtype=np.int32).reshape(1, 1, 1, capacity))
        self.masked = Tensor(MASKED, ms.float32)

    def construct(self, positions: Tensor) -> tuple[Tables, Tensor]:
        """For positions int32 ``[batch, tokens]``: tables, and an additive mask ``[batch, 1, tokens, capacity]``."""
        shape = (positions.shape[0], 1, positions.shape[1], -1)
        tables: Tables = ()
        if self.rotates:
            cos, sin = self.gather(self.cos, positions, 0), self.gather(self.sin, positions, 0)
            tables = (self.reshape(cos, shape), self.reshape(sin, shape))
        if self.biased:
            tables = (self.bias,)
        of_queries = self.reshape(positions, shape)
        mask = P.cast(self.columns > of_queries, ms.float32)
        if self.window:
            mask = mask + P.cast(self.columns <= of_queries - self.window, ms.float32)
        return tables, mask * self.masked


class CachedDecoder(nn.Cell):
    """Extends the cache of ``batch`` sequences by some tokens each and returns the logits after the last of them.

    It uses the parameters of ``lm`` itself, not copies: train on, and it generates with the new weights.
    ``caches``: those of the layers, where they exist already.
    """

    def __init__(
        self,
        lm: CausalLM,
        model: ModelConfig,
        kernels: Kernels,
        batch: int,
        capacity: int,
        caches: Sequence[LayerCache | FirstOfCache] | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.lm = lm
        architecture = model.architecture
        specs = [spec.attention for spec in architecture.main_layers]
        if caches is None:
            caches = [
                LayerCache(f"cache.{index}", batch, capacity, CacheForm.of(spec), kernels.activation)
                for index, spec in enumerate(specs)
            ]
        self.layers = nn.CellList(
            [
                CachedLayer(layer, ATTENTIONS[type(spec)](layer.attention, spec, cache, kernels, capacity))
                for layer, spec, cache in zip(lm.model.layers, specs, caches, strict=False)
            ],
            auto_prefix=False,
        )
        contexts = enumerate(architecture.contexts())
        self.contexts = nn.CellList(
            [CachedContext(context, capacity, model.seq_length, f"_{n}" if n else "") for n, context in contexts],
            auto_prefix=False,
        )
        heads = np.arange(batch * caches[0].form.heads, dtype=np.int32).reshape(batch, -1, 1)
        self.first_slots = Tensor(heads * capacity)
        self.minimum = P.Minimum()
        self.last_position = Tensor(model.seq_length - 1, ms.int32)  # padding may stand where no position was learnt
        self.batch = batch
        self.gather = P.Gather()
        self.reshape = P.Reshape()

    def construct(self, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """The logits, float32 ``[batch, vocab]``, after token ``last[b]`` of each row.

        Arguments:
            tokens: int32 ``[batch, tokens]``; what comes after ``last`` is padding.
            positions: int32 ``[batch, tokens]``, where in its sequence each token stands.
            last: int32 ``[batch]``, index of the last token of each row in the flattened ``tokens``.
        """
        x = self.hidden(tokens, positions)
        if tokens.shape[1] > 1:
            x = self.gather(x, last, 0)
        return P.cast(self.lm.logits(self.lm.model.norm_out(x)), ms.float32)

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the last layer makes of all tokens, ``[batch · tokens, hidden]``; arguments as above."""
        decoder, width = self.lm.model, tokens.shape[1]
        slots = self.reshape(self.first_slots + self.reshape(positions, (self.batch, 1, width)), (-1,))
        made: tuple[tuple[Tables, Tensor], ...] = ()
        for context in self.contexts:
            made = (*made, context(positions))
        x = decoder.embedded(tokens, self.batch, self.minimum(positions, self.last_position))
        for index, layer in enumerate(self.layers):
            tables, mask = made[decoder.context_of_layer[index]]
            x = layer(x, slots, tables, mask)
        return x


class ScoringDecoder(nn.Cell):
    """Extends the cache of ``decoder`` and says of every token how likely the model finds the one that follows it."""

    def __init__(self, decoder: CachedDecoder) -> None:
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.largest = P.ReduceMax(keep_dims=True)
        self.sum = P.ReduceSum(keep_dims=True)
        self.gather = P.GatherD()
        self.argmax = P.Argmax(axis=-1, output_type=ms.int32)
        self.reshape = P.Reshape()

    def construct(self, tokens: Tensor, positions: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """All int32 ``[batch, tokens]``, as :class:`CachedDecoder`; ``following``: the token that comes after each.

        Returns its log-probability in nats, float32 ``[batch, tokens]``, and the most likely token, int32 of the same shape.
        """
        shape, lm = tokens.shape, self.decoder.lm
        logits = P.cast(lm.logits(lm.model.norm_out(self.decoder.hidden(tokens, positions))), ms.float32)
        logits = logits - self.largest(logits, -1)
        chosen = self.gather(logits, 1, self.reshape(following, (-1, 1)))
        logprobs = chosen - P.log(self.sum(P.exp(logits), -1))
        return self.reshape(logprobs, shape), self.reshape(self.argmax(logits), shape)
