"""The largest attention logit since it was last asked for: one number of a layer, kept beside it while it computes.

A maximum over micro-batches and replicas is no sum, so no gradient can carry it; it is a parameter that the forward pass raises.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

LARGEST = "largest_logit"
LOWEST = -3e38  # before there was any; the mask adds a finite number, too


class LargestLogit(nn.Cell):
    """Masked scores ``[batch, heads, q, k]`` as they are; behind them the largest one that was seen is up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_logit = Parameter(Tensor(LOWEST, ms.float32), name=LARGEST, requires_grad=False)
        self.largest_logit.is_constant = True
        self.reduce_max = P.ReduceMax()
        self.maximum = P.Maximum()
        self.cast = P.Cast()
        self.assign = P.Assign()

    def construct(self, scores: Tensor) -> Tensor:
        found = self.cast(self.reduce_max(P.stop_gradient(scores), (0, 1, 2, 3)), ms.float32)
        return P.depend(scores, self.assign(self.largest_logit, self.maximum(self.largest_logit, found)))
