"""Decoding on a CPU with two operators in C++ (``decode.cc``): one per layer, one for the head.

A step of a few tokens is bound by reading the weights and by the number of operators; the compiled graph has some sixty per
layer. The kernels are the mathematics of :mod:`mindllm.models` in fp32; everything else goes through the cells themselves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.generate.graphs.cache import CachedDecoder
from mindllm.generate.graphs.library import numbers_of, table_of_codes
from mindllm.models.attention.attention import Attention
from mindllm.models.feed_forward import FeedForward
from mindllm.models.linear import Linear

LARGEST_BATCH = 16  # above it the matrix products of the back end are faster


class NativeDecoder(nn.Cell):
    """Decodes one token per sequence with the kernels, on the weights and the cache of a :class:`CachedDecoder`."""

    def __init__(self, decoder: CachedDecoder, config: ModelConfig, path: Path) -> None:
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.layer = P.Custom(f"{path}:decode_layer", _first, _first, func_type="aot")
        self.head = P.Custom(f"{path}:decode_head", _logits_shape, _first, func_type="aot")
        numbers = np.array(numbers_of(config, config.architecture.layers[0]), np.float32)
        self.numbers = Parameter(Tensor(numbers), name="cache.numbers", requires_grad=False)
        table = table_of_codes(config)
        self.is_quantized = table is not None
        if table is not None:
            self.table = Parameter(Tensor(table), name="cache.table", requires_grad=False)
            self.no_places = Parameter(Tensor(np.zeros(1, np.int32)), name="cache.no_places", requires_grad=False)
        self.nothing = Parameter(Tensor(np.zeros(1, np.float32)), name="cache.nothing", requires_grad=False)
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        # Under this phase a cell runs what it compiled without walking through its sub-cells to look whether shapes are new.
        self.phase = "increment"

    def construct(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``tokens`` and ``positions`` int32 ``[batch, 1]`` -> logits float32 ``[batch, vocab]``."""
        lm = self.decoder.lm
        positions = self.reshape(positions, (-1,))
        cos = self.gather(self.decoder.contexts[0].cos, positions, 0)
        sin = self.gather(self.decoder.contexts[0].sin, positions, 0)
        x = lm.model.embedded(tokens, tokens.shape[0], self.reshape(positions, (-1, 1)))
        for cached in self.decoder.layers:
            attention, feed_forward = cached.layer.attention, cached.layer.feed_forward
            x = self.layer(
                x,
                cos,
                sin,
                positions,
                self.numbers,
                cached.layer.attention_norm.weight,
                self.matrix(attention.wq),
                self.matrix(attention.wk),
                self.matrix(attention.wv),
                self.matrix(attention.wo),
                cached.layer.ffn_norm.weight,
                self.matrix(feed_forward.w1),
                self.matrix(feed_forward.w3),
                self.matrix(feed_forward.w2),
                cached.cache.keys,
                cached.cache.values,
                *self.optional(attention),
                *self.codes(attention, feed_forward),
            )
        return self.head(x, self.numbers, lm.model.norm_out.weight, lm.head_weight())

    def optional(self, attention: Attention) -> tuple[Tensor, ...]:
        """Biases and norms of heads, in the order of the kernel."""
        found: tuple[Tensor, ...] = ()
        for linear in (attention.wq, attention.wk, attention.wv, attention.wo):
            found = (*found, linear.bias if linear.has_bias else self.nothing)
        if attention.norms_heads:
            return (*found, attention.query_norm.weight, attention.key_norm.weight)
        return (*found, self.nothing, self.nothing)

    def matrix(self, linear: Linear) -> Tensor:
        """The weight, or the codes in its place."""
        return linear.held.codes if linear.is_quantized else linear.weight

    def codes(self, attention: Attention, feed_forward: FeedForward) -> tuple[Tensor, ...]:
        """What codes mean, and what belongs to those of each matrix, in the order of the kernel; or nothing."""
        if not self.is_quantized:
            return ()
        found: tuple[Tensor, ...] = (self.table,)
        for linear in (attention.wq, attention.wk, attention.wv, attention.wo):
            found = (*found, *self.of_codes(linear))
        for linear in (feed_forward.w1, feed_forward.w3, feed_forward.w2):
            found = (*found, *self.of_codes(linear))
        return found

    def of_codes(self, linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
        """Scales, zeros and places of columns of one matrix."""
        if not linear.is_quantized:
            return self.nothing, self.nothing, self.no_places
        held = linear.held
        zeros = held.zeros if held.has_zeros else self.nothing
        return held.scales, zeros, held.columns if held.ordered else self.no_places


def _first(x, *_):
    """Shape or type of the output: that of the first input."""
    return x


def _logits_shape(x: list[int], numbers: list[int], norm: list[int], head: list[int]) -> list[int]:
    return [x[0], head[0]]
