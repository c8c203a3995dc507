"""How many tokens went to each expert, told by the gradient of a weight that is always zero.

What is multiplied with that weight and added to the loss changes nothing, and its gradient is the count. So counts take the way
of all gradients: they are added over micro batches, replicas and processes, are computed once however often a layer is, and
need no output of the graph.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.architecture.experts import RouterSpec

PROBE = "feed_forward.load.probe"
PAIRS_PROBE = "pairs.probe"
"""The same of what is counted of pairs of answers (``finetune/preference.py``)."""
LOSS_PROBE = "prediction_losses."
"""What names of counters of what layers predict ahead have in them (``models/mtp.py``)."""
ROUTER_BIAS = "feed_forward.router.bias"


def is_probe(name: str) -> bool:
    """Whether a parameter is no weight but such a counter."""
    return name.endswith((PROBE, PAIRS_PROBE)) or LOSS_PROBE in name


class ExpertLoad(nn.Cell):
    """A mask of chosen experts fp32 ``[batch, seq, experts]`` and whether there was a place for each choice, fp32
    ``[batch, seq, chosen]`` -> zeros fp32 ``[batch]``.

    The gradient of ``probe`` ``[experts + 1]`` is the part of a sequence's tokens that chose each expert, then the choices that
    were dropped per token, times what the sequence counts for in the loss.
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

    def construct(self, mask: Tensor, kept: Tensor) -> Tensor:
        kept = self.reshape(self.of_kept(kept, (1, 2)), (-1, 1))
        dropped = self.dropped(self.negative(kept, -self.choices), self.choices)
        counted = P.stop_gradient(self.join((self.of_experts(mask, 1), dropped)))
        return self.sum(self.weigh(counted, self.probe), 1)
