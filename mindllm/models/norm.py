"""Root-mean-square normalisation (Zhang & Sennrich, 2019), computed in fp32 whatever the dtype of the hidden states."""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.models.kernels import DTYPES, Kernels


class RMSNorm(nn.Cell):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis: ``[tokens, hidden] -> [tokens, hidden]``, same dtype.

    The operator that yields the result is named ``norm``: communication recomputation addresses it by that name.
    """

    def __init__(self, hidden_size: int, eps: float, kernels: Kernels, compute_dtype: str = "float32") -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (hidden_size,), ms.float32), name="weight")
        self.fused = kernels.fused
        self.compute_dtype = DTYPES[compute_dtype]
        self.output_dtype = kernels.activation
        self.cast = P.Cast()
        if self.fused:
            self.norm = P.RmsNorm(eps)
        else:
            self.eps = eps
            self.square = P.Square()
            self.mean = P.ReduceMean(keep_dims=True)
            self.add = P.Add()
            self.rsqrt = P.Rsqrt()
            self.mul = P.Mul()
            self.norm = P.Mul()

    def construct(self, x: Tensor) -> Tensor:
        x = self.cast(x, self.compute_dtype)
        weight = self.cast(self.weight, self.compute_dtype)
        if self.fused:
            return self.cast(self.norm(x, weight)[0], self.output_dtype)
        variance = self.mean(self.square(x), -1)
        x = self.mul(x, self.rsqrt(self.add(variance, self.eps)))
        return self.cast(self.norm(x, weight), self.output_dtype)
