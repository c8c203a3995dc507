"""Collectives of optimizers on sharded weights and gradients: sums over parts, and gathered rows.

Operators of an optimizer run on a rank's parts, and the compiler inserts no communication for them. It first traces them with the
shapes of whole tensors, so they must support both: rows are gathered by an index over all rows and a sum, because an AllGather
would fit the parts only.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.parallel.context import in_group
from mindllm.parallel.weight_cut import WeightCut

ADDS = "adds"


class SumOverParts(nn.Cell):
    """Sums partial results over the parts of one dimension; identity if the dimension is whole.

    Args:
        cut: how the weight is sharded.
        dimension: the dimension.
        rank: this rank.
        adds: label of the operator in compiled graphs, because cells called by a map have no scope.
    """

    def __init__(self, cut: WeightCut, dimension: int, rank: int, adds: str = "") -> None:
        super().__init__(auto_prefix=False)
        self.exchanges = cut.parts(dimension) > 1
        if self.exchanges:
            self.add = in_group(P.AllReduce, cut.ranks_along(dimension, rank))
            if adds:
                self.add.add_prim_attr(ADDS, adds)

    def construct(self, x: Tensor) -> Tensor:
        return self.add(x) if self.exchanges else x


class WholeRows(nn.Cell):
    """Places a rank's rows ``[part, …]`` among zeros ``[rows, …]``; ``gathers``: and adds the rows of other ranks."""

    def __init__(self, cut: WeightCut, rank: int, gathers: bool) -> None:
        super().__init__(auto_prefix=False)
        self.places = cut.parts(0) > 1
        self.gathers = gathers
        if not self.places:
            return
        rows, part_rows = cut.shape[0], cut.part_shape[0]
        places = np.arange(rows) - cut.first(0, rank)
        inside = (places >= 0) & (places < part_rows)
        self.index = Tensor(np.where(inside, places, 0).astype(np.int32))
        self.inside = Tensor(inside.astype(np.float32))
        self.inside_rows = Tensor(inside.astype(np.float32).reshape(rows, 1))
        self.gather = P.Gather()
        self.add = SumOverParts(cut, 0, rank)

    def construct(self, x: Tensor) -> Tensor:
        if not self.places:
            return x
        inside = self.inside if x.ndim == 1 else self.inside_rows
        x = self.gather(x, self.index, 0) * inside
        return self.add(x) if self.gathers else x


class JoinedParts(nn.Cell):
    """All-gathers one dimension of a matrix, or of the matrices of experts. Used where tensors have the shapes of parts."""

    def __init__(self, cut: WeightCut, dimension: int, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.exchanges, self.dimension = cut.parts(dimension) > 1, dimension
        if self.exchanges:
            self.gather = in_group(P.AllGather, cut.ranks_along(dimension, rank))
            self.transpose = P.Transpose()
            sides = [*range(len(cut.shape))]
            sides[0], sides[dimension] = dimension, 0
            self.first = tuple(sides)

    def construct(self, x: Tensor) -> Tensor:
        if not self.exchanges:
            return x
        if self.dimension == 0:
            return self.gather(x)
        return self.transpose(self.gather(self.transpose(x, self.first)), self.first)


class SumOverDevices(nn.Cell):
    """Sums tensors over all devices of all stages.

    The compiler drops tensors of other stages from the tuple; ``zeros`` remain.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        self.zeros = Tensor(np.zeros(tuple(shape), np.float32))
        self.sum = P.AddN()
        self.add_ranks = P.AllReduce()

    def construct(self, parts: tuple[Tensor, ...]) -> Tensor:
        return self.add_ranks(self.sum((self.zeros, *parts)))


share_of_squares = ms.ops.MultitypeFuncGraph("share_of_squares")


@share_of_squares.register("Tensor", "Tensor")
def _share_of_squares(share, gradient):
    return share * ms.ops.reduce_sum(ms.ops.square(ms.ops.cast(gradient, ms.float32)), ())


class PartNorm(nn.Cell):
    """Euclidean norm of all gradients, fp32 scalar, from the parts on each rank.

    Args:
        cuts: how each gradient is sharded, in order.
    """

    def __init__(self, cuts: Sequence[WeightCut]) -> None:
        super().__init__(auto_prefix=False)
        self.shares = tuple(Tensor(1.0 / cut.copies, ms.float32) for cut in cuts)
        self.total = SumOverDevices(())
        self.map = ms.ops.HyperMap()
        self.sqrt = P.Sqrt()

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        return self.sqrt(self.total(self.map(share_of_squares, self.shares, gradients)))
