"""Recomputation: marks layers, cells and operators whose results are computed again in the backward pass.

Trading time for memory goes back to Chen et al. (2016); what is selected follows MindFormers. Precedence: an excluded
operator is kept even inside a fully recomputed layer, and full recomputation wins over selected operators.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mindspore import nn
from mindspore.ops import Primitive

from mindllm.config import RunConfig
from mindllm.config.recompute import RecomputeConfig
from mindllm.parallel.layer_plan import LayerAssignment, LayerPlan
from mindllm.parallel.patterns import match, match_some

logger = logging.getLogger(__name__)

# Attributes the compiler reads. (Primitive.recompute() can be called only once: the attribute then hides the method.)
OPERATOR = "recompute"
COMMUNICATION = "recompute_comm_op"  # also repeat what the compiler inserted beside the operator
Cells = Sequence[tuple[nn.Cell, LayerAssignment]]
IN_ORDER = ("select_recompute", "select_comm_recompute", "select_recompute_exclude", "select_comm_recompute_exclude")


def apply_recompute(layers: Sequence[nn.Cell], plan: LayerPlan, config: RunConfig) -> None:
    """Marks ``layers`` (one cell for each layer of the plan).

    Raises:
        UserError: a pattern that matches nothing, or cells where communication needs operators; names key and pattern.
    """
    cells = tuple(zip(layers, plan.layers, strict=True))
    for number, (layer, assignment) in enumerate(cells):
        if assignment.recompute:
            _recompute_layer(layer, config.recompute_config)
            logger.info("Set full recompute at layer %d", number)
        _select(layer, number, assignment, cells, config)


def _recompute_layer(layer: nn.Cell, options: RecomputeConfig) -> None:
    keywords = {}
    if options.recompute_slice_activation:
        keywords["recompute_slice_activation"] = True
    layer.recompute(mp_comm_recompute=options.mp_comm_recompute, **keywords)


def _select(layer: nn.Cell, number: int, assignment: LayerAssignment, cells: Cells, config: RunConfig) -> None:
    """Switches patterns on, then the excluded ones off.

    A pattern may name something in other layers it is for only; one of those that plain counts stand for need not name
    anything, as long as another does: a feed-forward without a gate multiplies nothing.
    """
    for key in IN_ORDER:
        touched = []
        for pattern in assignment.applied(key):
            if match(layer, pattern) or not (
                assignment.is_default(key)
                or any(match(cell, pattern) for cell, of in cells if pattern in of.applied(key))
            ):
                touched += _apply_pattern(layer, key, pattern, config)
        if touched:
            kind = "comm recompute" if "comm" in key else "recompute"
            action = "exclude" if key.endswith("exclude") else "on"
            logger.info("Set select %s %s at layer %d: %s", kind, action, number, ", ".join(touched))


def _apply_pattern(layer: nn.Cell, key: str, pattern: str, config: RunConfig) -> list[str]:
    """Marks what one pattern finds; returns the paths."""
    communication, on = "comm" in key, not key.endswith("exclude")
    try:
        found = match_some(layer, pattern, operators_only=communication or not on)
    except ValueError as error:
        raise config.error(f"recompute_config.{key}", str(error)) from None
    for item in found:
        if isinstance(item.target, Primitive):
            item.target.add_prim_attr(COMMUNICATION if communication else OPERATOR, on)
        else:
            item.target.recompute()
    return [item.path for item in found]
