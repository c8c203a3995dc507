"""Layers of other stages, thin: what neighbours see of them remains, attention and experts go.

For the graph of one stage the compiler reads, differentiates and shards the layers of all stages, and cuts the others off. What
it makes of the stage depends on the operators at its borders: norms and sums around attention and feed-forward, and what layers
add to the loss. Those stay, with their shardings; what is between them hands on what it is given.
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
    """Hidden states ``[batch · seq, hidden]`` as they are."""

    def construct(self, x: Tensor, batch: int, tables: Tables, mask: Tensor, random: Tensor | None = None) -> Tensor:
        return x


class ThinFeedForward(nn.Cell):
    """Hidden states ``[batch · seq, hidden]`` as they are."""

    def construct(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        return x


class ThinExperts(nn.Cell):
    """Hidden states ``[batch · seq, hidden]`` as they are, and what a router adds to the loss, fp32 ``[batch]``."""

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
    """Whether nothing but the operators at its borders tells a stage of the layers of others.

    Optimizers that work on matrices or ranks of all layers exchange them, and what is watched is known of every layer.
    """
    tunes = config.model.config.pet_config is not None or config.is_preference_tuning
    return not (tunes or config.optimizer.type == MUON or config.monitor_config.watched())


def make_others_thin(lm: CausalLM, plan: LayerPlan, stage: int) -> None:
    """Make the layers thin that are not on ``stage``; call it when operators are sharded."""
    for layer, assignment in zip(lm.model.layers, plan.layers, strict=True):
        if assignment.stage != stage and not isinstance(layer, FineGrainInterleavedLayer):
            for cell in _make_thin(layer, several_chunks=plan.chunks > 1):
                cell.pipeline_stage = assignment.stage
                if plan.v_shape:
                    cell.pipeline_segment = assignment.chunk


def _make_thin(layer: DecoderLayer, several_chunks: bool) -> Sequence[nn.Cell]:
    names = [(parameter, parameter.name) for parameter in layer.get_parameters()]
    layer.attention = ThinAttention()
    if not layer.has_experts:
        layer.feed_forward = ThinFeedForward()
    elif not (several_chunks and layer.feed_forward.grouped):  # else gradients get no shape (MindSpore 2.10)
        layer.feed_forward = ThinExperts(layer.feed_forward)
    for parameter, name in names:  # a cell that is set gives its parameters names of their place in the layer
        parameter.name = name
    return layer.attention, layer.feed_forward
