"""The feed-forward layer: gated (SwiGLU, GeGLU; Shazeer, 2020), ``w2(act(w1 x) · w3 x)``, or plain, ``w2(act(w1 x))``."""

from __future__ import annotations

from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import FeedForwardSpec
from mindllm.models.kernels import Kernels
from mindllm.models.linear import ACTIVATIONS, Linear
from mindllm.models.weights import InitStd


class FeedForward(nn.Cell):
    """``[tokens, hidden] -> [tokens, hidden]``; w1, w3 and w2 are Hugging Face's gate, up and down projection."""

    def __init__(self, spec: FeedForwardSpec, kernels: Kernels, spread: InitStd) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        activation = ACTIVATIONS[spec.activation]()
        self.w1 = Linear(hidden, inner, kernels, spread.inner, bias=spec.bias, activation=activation)
        self.gated = spec.gated
        if spec.gated:
            self.w3 = Linear(hidden, inner, kernels, spread.inner, bias=spec.bias)
            self.mul = P.Mul()
        self.w2 = Linear(inner, hidden, kernels, spread.output, bias=spec.bias or spec.out_bias)

    def construct(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """``random`` as for :class:`mindllm.models.linear.Linear`."""
        if self.gated:
            return self.w2(self.mul(self.w1(x, random), self.w3(x, random)), random)
        return self.w2(self.w1(x, random), random)
