"""A bottleneck behind attention or feed-forward (adapters: Houlsby et al., 2019): down, GELU, up, and what came in added."""

from __future__ import annotations

import math

from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.adapters import BottleneckSpec
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Linear, TanhGELU


class Bottleneck(nn.Cell):
    """``h -> h + U gelu(D h + d) + u`` on ``[tokens, hidden]``; D ``[length, hidden]``, U ``[hidden, length]``.

    D begins with the variance of Kaiming's uniform distribution, U and both biases with zeros: it begins as nothing.
    """

    def __init__(self, spec: BottleneckSpec, kernels: Kernels) -> None:
        super().__init__()
        spread = 1.0 / math.sqrt(3 * spec.hidden_size)
        self.down = Linear(spec.hidden_size, spec.length, kernels, spread, bias=True, activation=TanhGELU())
        self.up = Linear(spec.length, spec.hidden_size, kernels, 0.0, bias=True)
        self.add = P.Add()

    def construct(self, h: Tensor) -> Tensor:
        return self.add(h, self.up(self.down(h)))
