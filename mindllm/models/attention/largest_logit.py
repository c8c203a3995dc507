"""The largest attention logit since it was last asked for: one number of a layer, kept beside it while it computes.

A maximum over micro-batches and replicas is no sum, so no gradient can carry it; it is a parameter that the forward pass raises.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.models.weights import constant

LARGEST = "largest_logit"
LOWEST = -3e38  # before there was any; the mask adds a finite number, too


class LargestLogit(nn.Cell):
    """Masked scores ``[batch, heads, q, k]`` as they are; behind them the largest one that was seen is up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_logit = constant(LARGEST, np.array(LOWEST, np.float32))
        self.reduce_max = P.ReduceMax()
        self.maximum = P.Maximum()
        self.cast = P.Cast()
        self.assign = P.Assign()

    def construct(self, scores: Tensor) -> Tensor:
        found = self.cast(self.reduce_max(P.stop_gradient(scores), (0, 1, 2, 3)), ms.float32)
        return P.depend(scores, self.assign(self.largest_logit, self.maximum(self.largest_logit, found)))
