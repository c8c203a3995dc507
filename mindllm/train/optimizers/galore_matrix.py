"""What GaLore computes with one matrix: the first singular vectors of its gradient, what it is projected to, and the way back.

A device has a part of the gradient ``[m, n]``. Products over the longer side are sums over its parts. Parts of the shorter side
are put together where vectors are found, and added where a gradient is projected. Every device of a stage finds the same vectors:
it factorises the same sums.
"""

from __future__ import annotations

from dataclasses import replace

from mindspore import Tensor, nn, ops
from mindspore import ops as P

from mindllm.models.experts.grouped_experts import first_of
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.part_exchange import JoinedParts, SumOverParts

ITERATIONS = 16
TINY = 1e-20  # nothing is divided by zero, and a gradient that is zero keeps the vectors of the start


class GaLoreMatrix(nn.Cell):
    """A matrix ``[m, n]``, or a device's part of it, and its projection: ``[rank, n]`` where ``m >= n``, else ``[m, rank]``.

    Args:
        cut: of the matrix.
        rank: this device.
    """

    def __init__(self, cut: WeightCut, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.cut_of_weight = cut
        self.tall = cut.shape[0] >= cut.shape[1]
        self.longer, self.shorter = (0, 1) if self.tall else (1, 0)
        self.over_longer, self.over_shorter = (SumOverParts(cut, side, rank) for side in (self.longer, self.shorter))
        self.join_shorter = JoinedParts(cut, self.shorter, rank)
        self.shorter_is_cut = cut.parts(self.shorter) > 1
        self.first, self.own = cut.first(self.shorter, rank), cut.part_shape[self.shorter]
        self.product, self.by_rows, self.by_columns = P.MatMul(), P.MatMul(transpose_b=True), P.MatMul(transpose_a=True)
        self.transpose = P.Transpose()
        # The compiler traces operators with whole tensors first; these are opened when all tensors are a device's parts.
        self.is_cut = not cut.is_whole
        self.low_of_parts = P.Morph(self.projected, first_of, first_of)
        self.back_of_parts = P.Morph(self.projected_back, first_of, first_of)
        self.vectors_of_parts = P.Morph(self.singular_vectors, first_of, first_of)

    def low_cut(self, rank: int) -> WeightCut:
        """The cut of a gradient that is projected to ``rank``: along the longer side, as the weight's."""
        cut = self.cut_of_weight
        shape = (cut.shape[0], rank) if self.tall else (rank, cut.shape[1])
        return replace(
            cut,
            shape=shape,
            split=cut.split if cut.split == self.longer else None,
            shards=cut.shards if self.tall else 1,
        )

    def low(self, moment: Tensor, gradient: Tensor, projection: Tensor) -> Tensor:
        """The projected gradient, in the shape of its ``moment``."""
        if self.is_cut:
            return self.low_of_parts(moment, gradient, projection)
        return self.projected(moment, gradient, projection)

    def back(self, weight: Tensor, low: Tensor, projection: Tensor) -> Tensor:
        """What was projected, in the shape of the ``weight``."""
        if self.is_cut:
            return self.back_of_parts(weight, low, projection)
        return self.projected_back(weight, low, projection)

    def vectors(self, projection: Tensor, gradient: Tensor, start: Tensor) -> Tensor:
        """A new projection from a gradient and orthonormal ``start [shorter side, rank]``, in the shape of the old one."""
        if self.is_cut:
            return self.vectors_of_parts(projection, gradient, start)
        return self.singular_vectors(projection, gradient, start)

    def projected(self, moment: Tensor, gradient: Tensor, projection: Tensor) -> Tensor:
        """:meth:`low` of a part."""
        own = self.own_part(projection)
        low = self.by_rows(gradient, own) if self.tall else self.by_columns(own, gradient)
        return self.over_shorter(low)

    def projected_back(self, weight: Tensor, low: Tensor, projection: Tensor) -> Tensor:
        """:meth:`back` of a part."""
        own = self.own_part(projection)
        return self.product(low, own) if self.tall else self.product(own, low)

    def own_part(self, projection: Tensor) -> Tensor:
        """The columns of ``[rank, n]``, or the rows of ``[m, rank]``, of this device's part."""
        if not self.shorter_is_cut:
            return projection
        last = self.first + self.own
        return projection[:, self.first : last] if self.tall else projection[self.first : last]

    def singular_vectors(self, projection: Tensor, gradient: Tensor, start: Tensor) -> Tensor:
        """:meth:`vectors` of a part."""
        gradient = self.join_shorter(gradient)
        scale = ops.sqrt(self.over_longer(ops.reduce_sum(ops.square(gradient), ()))) + TINY
        scaled = gradient * (1.0 / scale)  # a CPU's kernels of division and transposition keep two indices per element
        product = self.by_columns if self.tall else self.by_rows
        square = self.over_longer(product(scaled, scaled))
        vectors = start
        for _ in range(ITERATIONS):
            vectors = ops.qr(self.product(square, vectors) + TINY * vectors)[0]
        return self.transpose(vectors, (1, 0)) if self.tall else vectors
