"""Figures of every row that a step counts next to its loss, as the gradient of a weight that is always zero."""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.models.experts.expert_load import PAIRS_PROBE


class CountedFigures(nn.Cell):
    """A loss with a ``probe`` whose gradient is the sum over the rows of ``figures`` numbers each. The last number counts the
    rows.

    The method is that of the tokens of experts (``models/experts/expert_load.py``).
    """

    def __init__(self, figures: int) -> None:
        super().__init__()
        self.probe = Parameter(initializer("zeros", (figures,), ms.float32), name=PAIRS_PROBE)
        self.largest_label = P.Maximum()
        self.reshape = P.Reshape()
        self.join = P.Concat(axis=1)
        self.count = P.Mul()
        self.times_probe = P.Mul()
        self.sum_counts = P.ReduceSum()
        self.add_nothing = P.Add()

    def targets(self, labels: Tensor) -> Tensor:
        """Return labels that are valid tokens everywhere: 0 at positions without a label."""
        return self.largest_label(labels, 0)

    def counted(self, figures: tuple[Tensor, ...], present: Tensor) -> Tensor:
        """Return zero, whose gradient for ``probe`` is the sum of the figures ``[rows]`` over present rows."""
        columns: tuple[Tensor, ...] = ()
        for figure in figures:
            columns = (*columns, self.reshape(figure, (-1, 1)))
        rows = P.stop_gradient(self.count(self.join(columns), self.reshape(present, (-1, 1))))
        return self.sum_counts(self.times_probe(rows, self.probe))
