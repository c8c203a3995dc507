"""Decoding on a CPU with two operators in C++ (``decode.cc``): one per layer, one for the head.

A step of a few tokens is bound by reading the weights and by the number of operators; the compiled graph has some sixty per
layer. The kernels are the mathematics of :mod:`mindllm.models` in fp32; everything else goes through the cells themselves.
"""

from __future__ import annotations

import math
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.config.layers import AttentionSpec, FeedForwardSpec, LayerSpec, RotarySpec
from mindllm.generate.cache import CachedDecoder
from mindllm.models import Kernels

LARGEST_BATCH = 16  # above it the matrix products of the back end are faster
WIDEST_HEAD = 512  # kWidestHead of the source


def supports(config: ModelConfig, kernels: Kernels, batch: int, capacity: int) -> bool:
    """Whether the kernels compute what the cells would: fp32 throughout on a CPU, and layers as :func:`_computes` says."""
    in_fp32 = kernels.operand == kernels.activation == kernels.norm == kernels.softmax == kernels.rotary == ms.float32
    architecture = config.architecture
    layers = all(_computes(kind, capacity) for kind in architecture.kinds())
    ends = architecture.final_norm.kind == "rms" and architecture.head.soft_cap is None
    one_table = len({kind.attention.position for kind in architecture.kinds()}) == 1
    return in_fp32 and not kernels.fused and batch <= LARGEST_BATCH and layers and ends and one_table


def _computes(layer: LayerSpec, capacity: int) -> bool:
    """Whether the kernel of a layer is that layer: rotary attention, a gated SiLU, root-mean-square norms, no bias."""
    attention, feed_forward = layer.attention, layer.feed_forward
    plain_attention = attention == AttentionSpec(
        attention.hidden_size,
        attention.num_heads,
        attention.kv_heads,
        attention.head_dim,
        scale=1.0 / math.sqrt(attention.head_dim),
        position=attention.position,
        window=attention.window,
    )
    sees_all = attention.window is None or attention.window >= capacity
    fits = isinstance(attention.position, RotarySpec) and attention.head_dim <= WIDEST_HEAD and sees_all
    plain = isinstance(feed_forward, FeedForwardSpec) and feed_forward == FeedForwardSpec(
        feed_forward.hidden_size, feed_forward.width
    )
    return fits and plain_attention and plain and not layer.norm_output and layer.norm.kind == "rms"


class NativeDecoder(nn.Cell):
    """Decodes one token per sequence with the kernels, on the weights and the cache of a :class:`CachedDecoder`."""

    def __init__(self, decoder: CachedDecoder, config: ModelConfig, path: Path) -> None:
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.layer = P.Custom(f"{path}:decode_layer", _first, _first, func_type="aot")
        self.head = P.Custom(f"{path}:decode_head", _logits_shape, _first, func_type="aot")
        self.eps = Parameter(Tensor(np.full(1, config.rms_norm_eps, np.float32)), name="cache.eps", requires_grad=False)
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
                self.eps,
                cached.layer.attention_norm.weight,
                attention.wq.weight,
                attention.wk.weight,
                attention.wv.weight,
                attention.wo.weight,
                cached.layer.ffn_norm.weight,
                feed_forward.w1.weight,
                feed_forward.w3.weight,
                feed_forward.w2.weight,
                cached.cache.keys,
                cached.cache.values,
            )
        return self.head(x, self.eps, lm.model.norm_out.weight, lm.head_weight())


def _first(x, *_):
    """Shape or type of the output: that of the first input."""
    return x


def _logits_shape(x: list[int], eps: list[int], norm: list[int], head: list[int]) -> list[int]:
    return [x[0], head[0]]
