"""What a layer keeps of earlier tokens, in arrays of static shape; shared beginnings and beams move whole sequences of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec


@dataclass(frozen=True)
class CacheForm:
    """Numbers that are kept of a token: ``heads`` keys of ``keys`` channels and as many values of ``values``; with no ``values``
    what is read as such is the keys.
    """

    heads: int
    keys: int
    values: int = 0

    @staticmethod
    def of(spec: AttentionSpec | LatentAttentionSpec) -> CacheForm:
        """Keys and values of all heads; of latent attention the narrow vector they are made of, and the key that is turned."""
        if isinstance(spec, LatentAttentionSpec):
            return CacheForm(1, spec.kv_lora_rank + spec.qk_rope_head_dim)
        return CacheForm(spec.num_kv_heads, spec.head_dim, spec.value_dim)

    @property
    def numbers(self) -> int:
        """Of one token."""
        return self.heads * (self.keys + self.values)


class LayerCache(nn.Cell):
    """Keys and values of one layer, as rows ``[batch · heads · capacity, width]``, each with their own width.

    One row per token and head lets one ``ScatterUpdate`` write any tokens of any rows in place (the CPU kernel copies nothing
    else), and the matrix products of attention read the whole as ``[batch, heads, capacity, width]`` without a transpose.
    """

    def __init__(self, name: str, batch: int, capacity: int, form: CacheForm, dtype: ms.dtype) -> None:
        super().__init__()
        self.form = form
        self.shape = (batch, form.heads, capacity, form.keys)
        self.shape_of_values = (*self.shape[:3], form.values)
        rows = batch * form.heads * capacity
        self.keys = Parameter(
            Tensor(np.zeros((rows, form.keys), np.float32), dtype), name=f"{name}.keys", requires_grad=False
        )
        self.has_values = form.values > 0
        if self.has_values:
            values = np.zeros((rows, form.values), np.float32)
            self.values = Parameter(Tensor(values, dtype), name=f"{name}.values", requires_grad=False)
        self.update = P.ScatterUpdate()
        self.reshape = P.Reshape()

    def construct(self, slots: Tensor, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Writes ``[batch, heads, tokens, width]`` to rows ``slots``; returns all, ``[batch, heads, capacity, width]``."""
        keys = self.reshape(self.update(self.keys, slots, self.as_rows(key)), self.shape)
        if not self.has_values:
            return keys, keys
        values = self.update(self.values, slots, self.as_rows(value))
        return keys, self.reshape(values, self.shape_of_values)

    def as_rows(self, x: Tensor) -> Tensor:
        """``[batch, heads, tokens, width] -> [batch · heads · tokens, width]``."""
        return self.reshape(x, (-1, x.shape[-1]))


class FirstOfCache(nn.Cell):
    """The first sequence of ``cache`` alone: what many share goes through the model once, and is then copied to the others."""

    def __init__(self, cache: LayerCache) -> None:
        super().__init__(auto_prefix=False)
        self.cache = cache
        self.form = cache.form
        self.shape = (1, *cache.shape[1:])
        self.shape_of_values = (1, *cache.shape_of_values[1:])
        self.rows = cache.shape[1] * cache.shape[2]
        self.slice = P.Slice()

    def construct(self, slots: Tensor, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As :class:`LayerCache` of a batch of one."""
        cache = self.cache
        keys = cache.update(cache.keys, slots, cache.as_rows(key))
        keys = cache.reshape(self.slice(keys, (0, 0), (self.rows, keys.shape[1])), self.shape)
        if not cache.has_values:
            return keys, keys
        values = cache.update(cache.values, slots, cache.as_rows(value))
        values = self.slice(values, (0, 0), (self.rows, values.shape[1]))
        return keys, cache.reshape(values, self.shape_of_values)


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
            self.assign(cache.keys, self.moved(cache.keys, cache.shape, sources))
            if cache.has_values:
                self.assign(cache.values, self.moved(cache.values, cache.shape_of_values, sources))
        return sources

    def moved(self, rows: Tensor, shape: tuple[int, ...], sources: Tensor) -> Tensor:
        """``rows`` with those of sequence ``sources[b]`` in the place of sequence ``b``."""
        return self.reshape(self.gather(self.reshape(rows, shape), sources, 0), rows.shape)
