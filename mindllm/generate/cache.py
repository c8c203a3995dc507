"""The static key/value cache, and the decoder that reads and extends it: one graph per number of tokens given at once.

Prefill and decode are the same cell on ``[batch, tokens]`` of different widths: the prompt padded to a bucket, then one token
a step. All shapes are static; where a token stands is data, so rows of a batch may be of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.models import CausalLM, Kernels
from mindllm.models.attention import ComposedAttention
from mindllm.models.decoder import MASKED, DecoderLayer
from mindllm.models.rotary import rotary_tables


class LayerCache(nn.Cell):
    """Keys and values of one layer, as rows ``[batch · kv_heads · capacity, head_dim]``.

    One row per token and head lets one ``ScatterUpdate`` write any tokens of any rows in place (the CPU kernel copies nothing
    else), and the matrix products of attention read the whole as ``[batch, kv_heads, capacity, head_dim]`` without a transpose.
    """

    def __init__(self, name: str, batch: int, capacity: int, model: ModelConfig, dtype: ms.dtype) -> None:
        super().__init__()
        self.shape = (batch, model.n_kv_heads, capacity, model.head_dim)
        self.rows = (-1, model.head_dim)
        zeros = np.zeros((batch * model.n_kv_heads * capacity, model.head_dim), np.float32)
        self.keys = Parameter(Tensor(zeros, dtype), name=f"{name}.keys", requires_grad=False)
        self.values = Parameter(Tensor(zeros, dtype), name=f"{name}.values", requires_grad=False)
        self.update = P.ScatterUpdate()
        self.reshape = P.Reshape()

    def construct(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes ``[batch, kv_heads, tokens, d]`` to rows ``slots``; returns all, ``[batch, kv_heads, capacity, d]``."""
        keys = self.update(self.keys, slots, self.reshape(key, self.rows))
        values = self.update(self.values, slots, self.reshape(value, self.rows))
        return self.reshape(keys, self.shape), self.reshape(values, self.shape)


class ReorderedCache(nn.Cell):
    """Gives every sequence of the caches the past of another one: what a beam search does when beams die and split."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        super().__init__(auto_prefix=False)
        self.caches = nn.CellList(caches, auto_prefix=False)
        self.gather = P.Gather()
        self.assign = P.Assign()
        self.reshape = P.Reshape()

    def construct(self, sources: Tensor) -> Tensor:
        """``sources`` int32 ``[batch]``: the row whose keys and values each row takes. Returns them."""
        for cache in self.caches:
            for content in (cache.keys, cache.values):
                moved = self.gather(self.reshape(content, cache.shape), sources, 0)
                self.assign(content, self.reshape(moved, cache.rows))
        return sources


class CachedLayer(nn.Cell):
    """A decoder layer whose tokens attend to the cache: ``[batch · tokens, hidden] -> [batch · tokens, hidden]``."""

    @lazy_inline(policy="front")
    def __init__(self, layer: DecoderLayer, cache: LayerCache, attention: ComposedAttention) -> None:
        super().__init__(auto_prefix=False)
        self.layer = layer
        self.cache = cache
        self.attention = attention
        self.batch = cache.shape[0]

    def construct(self, x: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        layer = self.layer
        query, key, value = layer.attention.project(layer.attention_norm(x), self.batch, cos, sin)
        keys, values = self.cache(slots, key, value)
        context = self.attention(query, keys, values, mask)
        x = layer.attention_add(x, layer.attention.output(context))
        return layer.ffn_add(x, layer.feed_forward(layer.ffn_norm(x)))


class CachedDecoder(nn.Cell):
    """Extends the cache of ``batch`` sequences by some tokens each and returns the logits after the last of them.

    It uses the parameters of ``lm`` itself, not copies: train on, and it generates with the new weights.
    """

    def __init__(self, lm: CausalLM, model: ModelConfig, kernels: Kernels, batch: int, capacity: int) -> None:
        super().__init__(auto_prefix=False)
        self.lm = lm
        attention = ComposedAttention(model, kernels)
        self.layers = nn.CellList(
            [
                CachedLayer(layer, LayerCache(f"cache.{index}", batch, capacity, model, kernels.activation), attention)
                for index, layer in enumerate(lm.model.layers)
            ],
            auto_prefix=False,
        )
        cos, sin = rotary_tables(model, capacity)
        self.cos = Parameter(Tensor(cos), name="cache.cos", requires_grad=False)
        self.sin = Parameter(Tensor(sin), name="cache.sin", requires_grad=False)
        heads = np.arange(batch * model.n_kv_heads, dtype=np.int32).reshape(batch, model.n_kv_heads, 1)
        self.first_slots = Tensor(heads * capacity)
        self.columns = Tensor(np.arange(capacity, dtype=np.int32).reshape(1, 1, 1, capacity))
        self.batch = batch
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.masked = Tensor(MASKED, ms.float32)

    def construct(self, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """The logits, float32 ``[batch, vocab]``, after token ``last[b]`` of each row.

        Arguments:
            tokens: int32 ``[batch, tokens]``; what comes after ``last`` is padding.
            positions: int32 ``[batch, tokens]``, where in its sequence each token stands.
            last: int32 ``[batch]``, index of the last token of each row in the flattened ``tokens``.
        """
        lm = self.lm
        width = tokens.shape[1]
        table = (self.batch, 1, width, -1)
        cos = self.reshape(self.gather(self.cos, positions, 0), table)
        sin = self.reshape(self.gather(self.sin, positions, 0), table)
        slots = self.reshape(self.first_slots + self.reshape(positions, (self.batch, 1, width)), (-1,))
        future = self.columns > self.reshape(positions, table)
        mask = P.cast(future, ms.float32) * self.masked
        x = lm.model.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, slots, cos, sin, mask)
        if width > 1:
            x = self.gather(x, last, 0)
        return P.cast(lm.logits(lm.model.norm_out(x)), ms.float32)
