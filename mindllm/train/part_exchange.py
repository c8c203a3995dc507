"""What ranks exchange of weights and gradients of which each has a part: sums over parts, and rows put together.

Operators of an optimizer run on a rank's parts as they are; the compiler exchanges nothing for them. It traces them with the
shapes of whole tensors first, so they must fit these as well: rows are put together by an index of all rows and a sum, where an
AllGather would fit the parts alone.
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
    """What each rank found for its part of one dimension, added up; as it is where that is whole.

    Args:
        cut: of the weight.
        rank: this one.
        adds: what, as an attribute of the operator in compiled graphs, where cells that a map calls have no scope.
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
    """A rank's rows ``[part, …]`` at their places among zeros, ``[rows, …]``; with those of others where it ``gathers``."""

    def __init__(self, cut: WeightCut, rank: int, gathers: bool) -> None:
        super().__init__(auto_prefix=False)
        self.places = cut.parts(0) > 1
        self.gathers = gathers
        if not self.places:
            return
        rows, own = cut.shape[0], cut.part_shape[0]
        places = np.arange(rows) - cut.first(0, rank)
        inside = (places >= 0) & (places < own)
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
    """A matrix, or matrices of experts, with the parts of one dimension put together; in a cell that is opened when tensors are a
    device's parts.
    """

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
    """The sum of parts ``[…]`` over all devices of all stages, behind ``after``.

    Parts of weights of other stages are taken out of the tuple by the compiler; ``zeros`` stay.
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


class NormOfParts(nn.Cell):
    """Euclidean norm of all gradients together, fp32 scalar, of which each rank has parts.

    Args:
        cuts: of the gradients, in their order.
    """

    def __init__(self, cuts: Sequence[WeightCut]) -> None:
        super().__init__(auto_prefix=False)
        self.shares = tuple(Tensor(1.0 / cut.copies, ms.float32) for cut in cuts)
        self.total = SumOverDevices(())
        self.map = ms.ops.HyperMap()
        self.sqrt = P.Sqrt()

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        return self.sqrt(self.total(self.map(share_of_squares, self.shares, gradients)))
