"""Thin layers of other stages, without attention and experts, for compiling the graph of one stage faster.

For the graph of one stage the compiler reads, differentiates and shards the layers of all stages, and removes the others. The
result depends on the operators at the borders of the stage: norms and sums around attention and feed-forward, and losses that
layers add. Those remain, with their shardings; the cells between them pass their input on.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor, nn

from mindllm.architecture.optimizer_state import MUON
from mindllm.config import RunConfig
from mindllm.models import CausalLM
from mindllm.models.attention.attention import Tables
from mindllm.models.decoder_layer import DecoderLayer
from mindllm.models.experts.experts import Experts
from mindllm.models.fine_grain_interleave import FineGrainInterleavedLayer
from mindllm.parallel.layer_plan import LayerPlan


class ThinAttention(nn.Cell):
    """Identity of hidden states ``[batch · seq, hidden]``."""

    def construct(self, x: Tensor, batch: int, tables: Tables, mask: Tensor, random: Tensor | None = None) -> Tensor:
        return x


class ThinFeedForward(nn.Cell):
    """Identity of hidden states ``[batch · seq, hidden]``."""

    def construct(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        return x


class ThinExperts(nn.Cell):
    """Identity of hidden states ``[batch · seq, hidden]``, with the loss that a router adds, fp32 ``[batch]``."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(auto_prefix=False)
        self.router, self.load = experts.router, experts.load
        self.balances = experts.balances
        if self.balances:
            self.add_load = experts.add_load

    def construct(
        self, x: Tensor, batch: int, may_drop: bool = True, random: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        _, weights, mask, added = self.router(x, batch)
        counted = self.load(mask, weights)
        return x, self.add_load(added, counted) if self.balances else counted


def can_be_thin(config: RunConfig) -> bool:
    """Return True if a stage depends on the layers of others only through the operators at its borders.

    Optimizers that work on matrices or ranks of all layers exchange them, and monitored figures need every layer.
    """
    tunes = config.model.config.pet_config is not None or config.is_preference_tuning
    return not (tunes or config.optimizer.type == MUON or config.monitor_config.watched())


def thin_other_stages(lm: CausalLM, plan: LayerPlan, stage: int) -> None:
    """Make the layers thin that are not on ``stage``. Operators must be sharded before."""
    for layer, assignment in zip(lm.model.layers, plan.layers, strict=True):
        if assignment.stage != stage and not isinstance(layer, FineGrainInterleavedLayer):
            for cell in _make_thin(layer, multiple_chunks=plan.chunks > 1):
                cell.pipeline_stage = assignment.stage
                if plan.v_shape:
                    cell.pipeline_segment = assignment.chunk


def _make_thin(layer: DecoderLayer, multiple_chunks: bool) -> Sequence[nn.Cell]:
    names = [(parameter, parameter.name) for parameter in layer.get_parameters()]
    layer.attention = ThinAttention()
    if not layer.has_experts:
        layer.feed_forward = ThinFeedForward()
    elif not (multiple_chunks and layer.feed_forward.grouped):  # otherwise gradients have no shape (MindSpore 2.10)
        layer.feed_forward = ThinExperts(layer.feed_forward)
    for parameter, name in names:  # assigning a cell renames its parameters after their place in the layer
        parameter.name = name
    return layer.attention, layer.feed_forward
