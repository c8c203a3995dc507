"""The decoder that reads and extends a static key/value cache: one graph per number of tokens given at once.

Prefill and decode are the same cell on ``[batch, tokens]`` of different widths: the prompt padded to a bucket, then one token
a step. All shapes are static; where a token stands is data, so rows of a batch may be of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, nn
from mindspore import ops as P

from mindllm.architecture.parts import AlibiSpec, AttentionContext, AttentionSpec, LatentAttentionSpec, RotarySpec
from mindllm.config import ModelConfig
from mindllm.generate.graphs.cached_attention import CompressedAttention, WholeAttention
from mindllm.generate.graphs.layer_cache import CacheForm, FirstOfCache, LayerCache
from mindllm.models import CausalLM, Kernels
from mindllm.models.attention.alibi import alibi_bias
from mindllm.models.attention.attention import Tables
from mindllm.models.attention.rotary import rotary_tables
from mindllm.models.decoder import MASKED
from mindllm.models.decoder_layer import DecoderLayer

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
