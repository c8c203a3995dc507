"""The largest attention logit of each head since the last reading, recorded in a layer during computation.

A maximum over micro-batches and replicas is not a sum, so a gradient cannot carry it. It is a parameter that the forward pass
raises. Each device has the maximum of its own rows and heads, which is exchanged once per step where all of them are needed.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

from mindllm.models.weights import constant

LARGEST = "largest_logit"
LOWEST = -3e38  # before there was any; the mask adds a finite number, too


class LargestLogit(nn.Cell):
    """``(passed, scores)`` -> ``passed`` unchanged, after an update of the largest score of each head.

    Scores are masked: ``[batch, heads, q, k]``, or the largest of each query, ``[batch, heads, q, any number]``.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.largest_logit = constant(LARGEST, np.full(heads, LOWEST, np.float32))
        self.reduce_max = P.ReduceMax()
        self.maximum = P.Maximum()
        self.cast = P.Cast()
        self.assign = P.Assign()

    def construct(self, passed: Tensor, scores: Tensor) -> Tensor:
        maxima = self.cast(self.reduce_max(P.stop_gradient(scores), (0, 2, 3)), ms.float32)
        return P.depend(passed, self.assign(self.largest_logit, self.maximum(self.largest_logit, maxima)))


def largest_logits(model: nn.Cell) -> list[Parameter]:
    """Return the largest logits of all layers that record them, by name."""
    return [item for item in model.get_parameters() if item.name.endswith(LARGEST)]
