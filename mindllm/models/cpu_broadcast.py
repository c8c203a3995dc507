"""Products that broadcast, written for a CPU.

Its kernels of arithmetic between tensors of two shapes keep some 16 bytes an element as long as they live, between tensors of
one shape nothing (measured, MindSpore 2.10). A matrix product with one column makes the shape the same.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P


class OuterProduct(nn.Cell):
    """``column[i] · row[j]`` as a matrix, ``[columns, rows]``, of tensors of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.reshape = P.Reshape()
        self.matmul = P.MatMul()

    def construct(self, column: Tensor, row: Tensor) -> Tensor:
        return self.matmul(self.reshape(column, (-1, 1)), self.reshape(row, (1, -1)))


class TileToShape(nn.Cell):
    """A table ``[*table]`` in all of the first dimensions of a shape that ends with its own: the tensor of that shape.

    float32. The compiler makes it once for all layers that ask for the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outer = OuterProduct()
        self.reshape = P.Reshape()

    def construct(self, table: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = 1
        for size in shape[: len(shape) - table.ndim]:
            count = count * size
        return self.reshape(self.outer(ms.ops.ones((count, 1), ms.float32), table), shape)
