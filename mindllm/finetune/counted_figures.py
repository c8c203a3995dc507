"""Figures that a step counts of every row beside its loss, told by the gradient of a weight that is always zero."""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.models.experts.expert_load import PAIRS_PROBE


class CountedFigures(nn.Cell):
    """The gradient of ``probe`` is the sum over the rows of ``figures`` numbers of each, the last of which counts them.

    Counted as the tokens of experts are (``models/experts/expert_load.py``).
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
        """Labels that are tokens everywhere: 0 where there is none."""
        return self.largest_label(labels, 0)

    def counted(self, figures: tuple[Tensor, ...], present: Tensor) -> Tensor:
        """Zero, whose gradient for ``probe`` is the sum of the figures ``[rows]`` of the rows that are there."""
        columns: tuple[Tensor, ...] = ()
        for figure in figures:
            columns = (*columns, self.reshape(figure, (-1, 1)))
        rows = P.stop_gradient(self.count(self.join(columns), self.reshape(present, (-1, 1))))
        return self.sum_counts(self.times_probe(rows, self.probe))
