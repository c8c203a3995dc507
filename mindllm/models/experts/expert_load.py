"""The number of tokens per expert, as the gradient of a weight that is always zero.

The product of that weight with the counts, added to the loss, changes nothing, and the gradient is the count. Counts are
therefore summed over micro-batches, replicas and processes like all gradients, are computed once even if a layer is recomputed,
and need no output of the graph.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.architecture.experts import RouterSpec

PROBE = "feed_forward.load.probe"
PAIRS_PROBE = "pairs.probe"
"""The counter of pairs of answers (``finetune/preference.py``)."""
LOSS_PROBE = "prediction_losses."
"""Part of the names of prediction layers' counters (``models/mtp.py``)."""
ROUTER_BIAS = "feed_forward.router.bias"


def is_probe(name: str) -> bool:
    """Return True if a parameter is a counter and not a weight."""
    return name.endswith((PROBE, PAIRS_PROBE)) or LOSS_PROBE in name


class ExpertLoad(nn.Cell):
    """A mask of chosen experts fp32 ``[batch, seq, experts]`` and a mask of choices with a place, fp32 ``[batch, seq, chosen]``
    -> zeros fp32 ``[batch]``.

    The gradient of ``probe`` ``[experts + 1]`` is the fraction of a sequence's tokens that chose each expert, then the dropped
    choices per token, times the weight of the sequence in the loss.
    """

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__()
        self.probe = Parameter(initializer("zeros", (spec.experts + 1,), ms.float32), name="probe")
        self.choices = float(spec.top_k)
        self.of_experts = P.ReduceMean()
        self.of_kept = P.ReduceMean(keep_dims=True)
        self.negative = P.Mul()
        self.dropped = P.Add()
        self.join = P.Concat(axis=1)
        self.weigh = P.Mul()
        self.sum = P.ReduceSum()
        self.reshape = P.Reshape()

    def construct(self, mask: Tensor, placed: Tensor) -> Tensor:
        placed = self.reshape(self.of_kept(placed, (1, 2)), (-1, 1))
        dropped = self.dropped(self.negative(placed, -self.choices), self.choices)
        counted = P.stop_gradient(self.join((self.of_experts(mask, 1), dropped)))
        return self.sum(self.weigh(counted, self.probe), 1)
