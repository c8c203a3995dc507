"""Rotary position embedding (Su et al., 2021) as a cell; its angles are :mod:`mindllm.architecture.rotary_tables`."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.models.cpu_broadcast import TileToShape
from mindllm.models.kernels import Kernels


def half_turn_matrix(width: int) -> np.ndarray:
    """``x @ matrix`` is ``(-second half, first half)`` of ``x``: float32 ``[width, width]``."""
    half = np.eye(width // 2, dtype=np.float32)
    zero = np.zeros_like(half)
    return np.block([[zero, half], [-half, zero]])


class RotaryEmbedding(nn.Cell):
    """Rotates queries or keys ``[batch, heads, seq, head_dim]`` by tables ``[seq, head_dim]`` (or any shape that broadcasts).

    On CPU the half turn is a matrix product, which is exact and takes half as long as splitting and joining channels.
    """

    def __init__(self, head_dim: int, kernels: Kernels) -> None:
        super().__init__()
        self.compute_dtype = kernels.rotary
        self.output_dtype = kernels.activation
        self.cast = P.Cast()
        self.mul_cos = P.Mul()
        self.mul_sin = P.Mul()
        self.add = P.Add()
        self.tables_of_rows = kernels.document_masks
        self.by_matrix = kernels.cpu
        self.repeats = kernels.same_shapes and kernels.rotary == ms.float32
        if self.repeats:
            self.repeated = TileToShape()
        if self.by_matrix:
            self.matrix = Tensor(half_turn_matrix(head_dim), self.compute_dtype)
            self.matmul = P.MatMul()
            self.reshape = P.Reshape()
        else:
            self.neg = P.Neg()
            self.split = P.Split(axis=-1, output_num=2)
            self.concat = P.Concat(axis=-1)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.cast(x, self.compute_dtype)
        cos = self.cast(cos, self.compute_dtype)
        sin = self.cast(sin, self.compute_dtype)
        if self.repeats and cos.ndim == 2:
            cos, sin = self.repeated(cos, x.shape), self.repeated(sin, x.shape)
        y = self.add(self.mul_cos(x, cos), self.mul_sin(self.half_turned(x), sin))
        return self.cast(y, self.output_dtype)

    def half_turned(self, x: Tensor) -> Tensor:
        """``(-second half, first half)`` of the channels."""
        if self.by_matrix:
            return self.reshape(self.matmul(self.reshape(x, (-1, x.shape[-1])), self.matrix), x.shape)
        first, second = self.split(x)
        return self.concat((self.neg(second), first))
