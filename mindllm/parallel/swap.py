"""Moving results to the host until the backward pass needs them: marks the operators that ``swap_config`` names.

The compiler puts a ``MoveTo`` behind a marked operator and one before its use in the backward pass (Cell.offload of MindSpore);
it does so in the network that micro-batches share. What is recomputed is not kept, so there is nothing to move.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mindspore import nn
from mindspore.ops import Primitive

from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerPlan
from mindllm.parallel.operators import operators
from mindllm.parallel.recompute import OPERATOR, match_some

logger = logging.getLogger(__name__)
MOVED, AHEAD = "offload", "backward_prefetch"  # attributes the compiler reads


def apply_swap(layers: Sequence[nn.Cell], plan: LayerPlan, config: RunConfig) -> None:
    """Marks what is moved of ``layers``; call it when recomputation is marked.

    Raises:
        UserError: a pattern that matches nothing, or names only what is computed again.
    """
    for number, (layer, assignment) in enumerate(zip(layers, plan.layers, strict=True)):
        for pattern, ahead in config.swap_config.of_layer(number).items():
            if assignment.recompute:
                message = f"layer {number} is recomputed as a whole, and keeps nothing that could be moved"
                raise config.error("swap_config", f"{message}; leave it out here or in recompute_config.recompute")
            found = _named(layer, pattern, config)
            kept = {path: one for path, one in found.items() if OPERATOR not in one.attrs or not one.attrs[OPERATOR]}
            if not kept:
                message = f"'{pattern}' names what layer {number} computes again, and does not keep"
                raise config.error("swap_config.op_swap", f"{message}; leave it out here or in recompute_config")
            for one in kept.values():
                one.add_prim_attr(MOVED, True)
                one.add_prim_attr(AHEAD, ahead)
            logger.info("Set swap at layer %d: %s", number, ", ".join(kept) if pattern else "all that is kept")


def _named(layer: nn.Cell, pattern: str, config: RunConfig) -> Mapping[str, Primitive]:
    """Operators by path: those of the whole layer, or of what ``pattern`` finds."""
    if not pattern:
        return operators(layer)
    try:
        items = match_some(layer, pattern, operators_only=False)
    except ValueError as error:
        raise config.error("swap_config.op_swap", str(error)) from None
    found: dict[str, Primitive] = {}
    for item in items:
        inside = {"": item.target} if isinstance(item.target, Primitive) else operators(item.target)
        found |= {f"{item.path}.{name}".rstrip("."): one for name, one in inside.items()}
    return found
