"""Norms over the channels, computed in fp32 whatever the dtype of the hidden states: root mean square, or LayerNorm."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import NormSpec
from mindllm.models.cpu_broadcast import OuterProduct
from mindllm.models.kernels import Kernels
from mindllm.models.weights import make_weight


class RMSNorm(nn.Cell):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis (Zhang & Sennrich, 2019): any shape, same dtype.

    With ``rms_one`` the factor is ``1 + weight``. The operator that yields the result is named ``norm``: communication
    recomputation addresses it by that name.
    """

    def __init__(self, width: int, spec: NormSpec, kernels: Kernels) -> None:
        super().__init__()
        self.plus_one = spec.kind == "rms_one"
        start = "zeros" if self.plus_one else "ones"
        self.weight = make_weight("weight", start, (width,), kernels.norm_weights)
        self.fused = kernels.fused
        self.compute_dtype = kernels.norm
        self.output_dtype = kernels.activation
        self.cast = P.Cast()
        if self.plus_one:
            self.add_one = P.Add()
        if self.fused:
            self.norm = P.RmsNorm(spec.eps)
        else:
            self.eps = spec.eps
            self.square = P.Square()
            self.add = P.Add()
            self.rsqrt = P.Rsqrt()
            self.norm = P.Mul()
        self.same_shapes = kernels.same_shapes and kernels.norm == ms.float32
        if self.same_shapes:
            self.part = 1.0 / width  # the gradient of a mean would divide
            self.sum = P.ReduceSum(keep_dims=True)
            self.factors = OuterProduct()
            self.reshape = P.Reshape()
        elif not self.fused:
            self.mean = P.ReduceMean(keep_dims=True)
            self.mul = P.Mul()

    def construct(self, x: Tensor) -> Tensor:
        x = self.cast(x, self.compute_dtype)
        weight = self.cast(self.weight, self.compute_dtype)
        if self.plus_one:
            weight = self.add_one(weight, 1.0)
        if self.fused:
            return self.cast(self.norm(x, weight)[0], self.output_dtype)
        if self.same_shapes:
            variance = self.sum(self.square(x), -1) * self.part
            factors = self.factors(self.rsqrt(self.add(variance, self.eps)), weight)
            return self.cast(self.norm(x, self.reshape(factors, x.shape)), self.output_dtype)
        variance = self.mean(self.square(x), -1)
        x = self.mul(x, self.rsqrt(self.add(variance, self.eps)))
        return self.cast(self.norm(x, weight), self.output_dtype)


class LayerNorm(nn.Cell):
    """``(x - mean) / sqrt(variance + eps) · weight + bias`` over the last axis (Ba et al., 2016): any shape, same dtype."""

    def __init__(self, width: int, spec: NormSpec, kernels: Kernels) -> None:
        super().__init__()
        self.weight = make_weight("weight", "ones", (width,), kernels.norm_weights)
        self.bias = make_weight("bias", "zeros", (width,), kernels.norm_weights)
        self.compute_dtype = kernels.norm
        self.output_dtype = kernels.activation
        self.cast = P.Cast()
        self.norm = P.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=spec.eps)

    def construct(self, x: Tensor) -> Tensor:
        x = self.cast(x, self.compute_dtype)
        weight, bias = self.cast(self.weight, self.compute_dtype), self.cast(self.bias, self.compute_dtype)
        return self.cast(self.norm(x, weight, bias)[0], self.output_dtype)


def make_norm(width: int, spec: NormSpec, kernels: Kernels) -> nn.Cell:
    """Return the norm of a specification over ``width`` channels."""
    return LayerNorm(width, spec, kernels) if spec.kind == "layer" else RMSNorm(width, spec, kernels)
