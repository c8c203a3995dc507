"""A low-rank adapter of a projection: LoRA (Hu et al., 2021); DoRA (Liu et al., 2024), which trains lengths of rows; AdaLoRA
(Zhang et al., 2023), which trains a diagonal matrix between both.
"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.architecture.adapters import MAGNITUDE, VALUES, A, AdapterSpec, B, BottleneckSpec
from mindllm.models.dropout import Dropout
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Linear, Operand, TanhGELU
from mindllm.models.weights import make_weight, normal_parameter

# A bottleneck after attention or feed-forward (adapters: Houlsby et al., 2019): down, GELU, up, plus its input.


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


INITIAL_STD = 0.02  # of A and B of AdaLoRA


class LoraAdapter(nn.Cell):
    """Operand ``x`` ``[tokens, in]`` and product ``y = x Wᵀ`` ``[tokens, out]`` -> ``y + scale · (x Aᵀ) Bᵀ``.

    A ``[rank, in]`` begins with the variance of Kaiming's uniform distribution, B ``[out, rank]`` with zeros: an adapter begins
    as nothing. ``first_of``: another adapter whose A both multiply by. ``salt`` sets its dropout apart from others.

    Where the specification has values, ``y + scale · (e ∘ x Aᵀ) Bᵀ``: e ``[rank]`` begins with zeros, A and B with N(0, 0.02²).
    """

    def __init__(
        self,
        spec: AdapterSpec,
        kernels: Kernels,
        first_of: LoraAdapter | None = None,
        salt: int = 0,
    ) -> None:
        super().__init__()
        self.drops = spec.dropout > 0
        if self.drops:
            self.dropout = Dropout(spec.dropout, spec.in_features, salt, again=not kernels.cpu)
        std = INITIAL_STD if spec.has_values else 1.0 / math.sqrt(3 * spec.in_features)
        self.lora_a: Parameter = (
            first_of.lora_a if first_of else normal_parameter(A, (spec.rank, spec.in_features), std, kernels.weights)
        )
        self.has_values = spec.has_values
        if spec.has_values:
            zeros = initializer("zeros", (spec.rank,), ms.float32)
            self.lora_e: Parameter = first_of.lora_e if first_of else Parameter(zeros, name=VALUES)
            self.lora_b = normal_parameter(B, (spec.out_features, spec.rank), INITIAL_STD)
            self.values = P.Mul()
        else:
            self.lora_b = make_weight(B, "zeros", (spec.out_features, spec.rank), kernels.weights)
        self.factor = spec.scale
        self.operand = Operand(kernels)
        self.down = P.MatMul(transpose_b=True)
        self.scale = P.Mul()
        self.up = P.MatMul(transpose_b=True)
        self.add = P.Add()
        self.has_lengths = spec.dora
        if spec.dora:
            self.lora_magnitude = Parameter(initializer("ones", (spec.out_features,), ms.float32), name=MAGNITUDE)
            self.lengths = RowLengths(spec.scale, spec.in_features, kernels.weights.stored != ms.float32)
            self.divide = P.Div()
            self.rescale = P.Mul()
            self.cast = P.Cast()

    def construct(self, x: Tensor, y: Tensor, weight: Tensor, random: Tensor | None = None) -> Tensor:
        """``random``, int32 ``[batch, seq]``: what dropout is drawn by; None: nothing is dropped."""
        if self.drops:
            x = self.dropout(x, random)
        low = self.scale(self.down(x, self.operand.of_weight(self.lora_a, x)), self.factor)
        if self.has_values:
            low = self.values(low, self.operand(self.lora_e))
        low = self.operand(low)
        y = self.add(y, self.up(low, self.operand.of_weight(self.lora_b, low)))
        if not self.has_lengths:
            return y
        lengths = P.stop_gradient(self.lengths(weight, self.lora_a, self.lora_b))
        return self.rescale(y, self.cast(self.divide(self.lora_magnitude, lengths), y.dtype))


class RowLengths(nn.Cell):
    """Lengths ``[out]`` of the rows of ``W + s B A`` in fp32, without forming it.

    ``|w + s b A|² = |w|² + 2 s (W Aᵀ · b) + s² (b A Aᵀ · b)`` row by row: the largest product is ``[out, rank]``. ``|w|²`` is
    a product with ones, because columns may be split over devices that have replicas: of the operators that add over such
    devices, MindSpore 2.10 takes axes by name of matrix products alone.
    """

    def __init__(self, scale: float, in_features: int, widens: bool) -> None:
        super().__init__()
        self.factor, self.widens = scale, widens
        self.ones = Tensor(np.ones((1, in_features), np.float32))
        self.cast = P.Cast()
        self.square = P.Square()
        self.sum = P.MatMul(transpose_b=True)
        self.along = P.MatMul(transpose_b=True)
        self.products = P.MatMul(transpose_b=True)
        self.mix = P.MatMul()
        self.twice = P.Mul()
        self.scaled = P.Mul()
        self.both = P.Add()
        self.against = P.Mul()
        self.sum_cross = P.ReduceSum(keep_dims=True)
        self.total = P.Add()
        self.root = P.Sqrt()
        self.reshape = P.Reshape()

    def construct(self, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """W ``[out, in]`` in any type, A ``[rank, in]`` and B ``[out, rank]``."""
        weight = self.cast(weight, ms.float32)
        if self.widens:
            first, second = self.cast(first, ms.float32), self.cast(second, ms.float32)
        squares = self.sum(self.square(weight), self.ones)
        along = self.twice(self.along(weight, first), 2.0 * self.factor)
        mixed = self.scaled(self.mix(second, self.products(first, first)), self.factor**2)
        cross = self.sum_cross(self.against(self.both(along, mixed), second), 1)
        return self.reshape(self.root(self.total(squares, cross)), (-1,))
