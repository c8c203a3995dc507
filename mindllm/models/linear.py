"""The matrix product every projection is made of: ``y = x Wᵀ (+ b)``, weights ``[out, in]`` as in Hugging Face files."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import ops as P

from mindllm.architecture.parts import Activation
from mindllm.models.dequantize import DequantizedWeight
from mindllm.models.kernels import Kernels
from mindllm.models.weights import make_weight, normal_parameter

# Computed again with the operand that it waits for, it would read the parameter itself, which is copied then.
depend_once = P.Depend()
depend_once.recompute(False)


class Operand(nn.Cell):
    """Brings an operand of a matrix product to the compute dtype; bf16 on CPU is rounded and kept as fp32."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.cast = P.Cast()
        self.operand = kernels.operand
        self.activation = kernels.activation
        self.rounds = kernels.rounds_operands
        self.is_half = kernels.operand != ms.float32

    def construct(self, x: Tensor) -> Tensor:
        x = self.cast(x, self.operand)
        if self.rounds:
            x = self.cast(x, self.activation)
        return x

    def of_weight(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return a weight as operand of a product with ``x``.

        A micro-batch of a pipeline returns what its gradients read, and MindSpore copies a parameter that is returned. A weight
        that needs no cast is made to depend on ``x``, so that no parameter is returned.
        """
        operand = self.construct(weight)
        if self.is_half and weight.dtype == self.operand:
            return depend_once(operand, ops.stop_gradient(x))
        return operand


class SiLU(nn.Cell):
    """``x · sigmoid(x)``; the primitive is named ``silu`` because recomputation patterns address it by that name."""

    def __init__(self) -> None:
        super().__init__()
        self.silu = ms.ops.auto_generate.SiLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.silu(x)


class TanhGELU(nn.Cell):
    """``x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`` (Hendrycks & Gimpel, 2016), as most published models compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu = P.GeLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.gelu(x)


class QuickGELU(nn.Cell):
    """``x · sigmoid(1.702 x)`` (Hendrycks & Gimpel, 2016): the coarser approximation, MindSpore's FastGeLU."""

    def __init__(self) -> None:
        super().__init__()
        self.quick_gelu = P.FastGeLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.quick_gelu(x)


ACTIVATIONS: dict[Activation, type[nn.Cell]] = {"silu": SiLU, "gelu_tanh": TanhGELU, "quick_gelu": QuickGELU}


class SoftCap(nn.Cell):
    """``cap · tanh(x / cap)``: nearly ``x`` near zero, never beyond ``cap`` (Gemma 2)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap
        self.divide = P.Mul()
        self.tanh = P.Tanh()
        self.multiply = P.Mul()

    def construct(self, x: Tensor) -> Tensor:
        return self.multiply(self.tanh(self.divide(x, 1.0 / self.cap)), self.cap)


class Linear(nn.Cell):
    """``[tokens, in] -> [tokens, out]`` in the compute dtype; weight ``[out, in]`` and optional bias ``[out]``.

    A weight that is held in codes (:meth:`hold`) is dequantized on use.

    ``activation`` is a cell applied to the result; it lives here so that its path is ``feed_forward.w1.activation``. An
    ``adapter`` (:meth:`attach`) makes of the operand ``[tokens, in]``, the product ``[tokens, out]``, the weight and ``random``
    what takes the place of the product.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernels: Kernels,
        std: float,
        bias: bool = False,
        activation: nn.Cell | None = None,
    ) -> None:
        super().__init__()
        self.weight = normal_parameter("weight", (out_features, in_features), std, kernels.weights)
        self.has_bias = bias
        if bias:
            self.bias = make_weight("bias", "zeros", (out_features,), kernels.weights)
            self.bias_add = P.Add()
        self.matmul = P.MatMul(transpose_b=True)
        self.operand = Operand(kernels)
        self.cast = P.Cast()
        self.has_activation = activation is not None
        if activation is not None:
            self.activation = activation
        self.has_adapter = False
        self.is_quantized = False

    def hold(self, codes: DequantizedWeight) -> None:
        """Replace the weight parameter by codes."""
        self.held = codes
        self.is_quantized = True
        del self.weight

    def matrix(self, x: Tensor) -> Tensor:
        """Return the weight ``[out, in]`` for the product with ``x``. A quantized weight is dequantized here."""
        return self.held(x) if self.is_quantized else self.weight

    def attach(self, adapter: nn.Cell) -> None:
        """Attach an adapter to the weight."""
        self.adapter = adapter
        self.has_adapter = True

    def construct(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Project ``x``. ``random``, int32 ``[batch, seq]``: the keys of the adapter's dropout."""
        x = self.operand(x)
        weight = self.matrix(x)
        y = self.matmul(x, self.operand.of_weight(weight, x))
        if self.has_adapter:
            y = self.adapter(x, y, weight, random)
        if self.has_bias:
            y = self.bias_add(y, self.cast(self.bias, y.dtype))
        if self.has_activation:
            y = self.activation(y)
        return y
