"""Decoding on a CPU with two operators in C++ (``decode.cc``): one per layer, one for the head.

A step of a few tokens is bound by reading the weights and by the number of operators; the compiled graph has some sixty per
layer. The kernels are the mathematics of :mod:`mindllm.models` in fp32; everything else goes through the cells themselves.
"""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.generate.cache import CachedDecoder
from mindllm.models import Kernels

LARGEST_BATCH = 16  # above it the matrix products of the back end are faster
WIDEST_HEAD = 512  # kWidestHead of the source


def supports(config: ModelConfig, kernels: Kernels, batch: int) -> bool:
    """Whether the kernels compute what the cells would: fp32 throughout, no bias, on a CPU."""
    types = {config.layernorm_compute_type, config.softmax_compute_type, config.rotary_dtype}
    in_fp32 = kernels.operand == kernels.activation == ms.float32 and types == {"float32"}
    fits = batch <= LARGEST_BATCH and config.head_dim <= WIDEST_HEAD
    return in_fp32 and fits and not (kernels.fused or config.qkv_has_bias or config.attn_proj_has_bias)


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
        cos = self.gather(self.decoder.cos, positions, 0)
        sin = self.gather(self.decoder.sin, positions, 0)
        x = lm.model.tok_embeddings(tokens)
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
