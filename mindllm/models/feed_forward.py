"""The gated feed-forward layer (SwiGLU; Shazeer, 2020): ``w2(silu(w1 x) · w3 x)``."""

from __future__ import annotations

import math

from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Linear, SiLU


class FeedForward(nn.Cell):
    """``[tokens, hidden] -> [tokens, hidden]``; w1, w3 and w2 are Hugging Face's gate, up and down projection."""

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        hidden, inner, std = model.hidden_size, model.intermediate_size, model.initializer_range
        self.w1 = Linear(hidden, inner, kernels, std, activation=SiLU())
        self.w3 = Linear(hidden, inner, kernels, std)
        self.w2 = Linear(inner, hidden, kernels, std / math.sqrt(2 * model.num_layers))
        self.mul = P.Mul()

    def construct(self, x: Tensor) -> Tensor:
        return self.w2(self.mul(self.w1(x), self.w3(x)))
