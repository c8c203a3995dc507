"""Marks of the compiler on the cells of a model: operators whose results move to the host, layers in parts, equal
layers, experts of sorted tokens.

Results that ``swap_config`` names move to the host until the backward pass needs them. The compiler inserts a ``MoveTo`` after a
marked operator and one before its use in the backward pass (Cell.offload of MindSpore), in the network that micro-batches share.
Recomputed results are not saved, so they cannot move.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import mindspore as ms
from mindspore import nn
from mindspore.ops import Primitive

from mindllm.config import RunConfig
from mindllm.models import CausalLM
from mindllm.models.attention.ring_attention import RingAttention
from mindllm.models.experts.grouped_experts import GroupedFeedForward
from mindllm.models.fine_grain_interleave import FineGrainInterleavedLayer
from mindllm.parallel.context import group_of, mark_ranks
from mindllm.parallel.layer_plan import LayerPlan
from mindllm.parallel.layout import CONTEXT, Mesh
from mindllm.parallel.operators import cell_operators, operators
from mindllm.parallel.recompute import OPERATOR, match_some

# Marks of the compiler on layers that take their rows in parts (``models/fine_grain_interleave.py``), as MindFormers sets them.
#
# ``skip_redistribution``: each device cuts and joins the rows it has. ``fine_grained_interleaved_index``: between which cuts and
# which join the compiler orders two parts, so that one exchanges while the other computes. Joins need numbers of their own: of
# two with one number it makes one block, whose order goes round in a circle ("Graph cycle exists").

SKIP_REDISTRIBUTION = "skip_redistribution"
BLOCK = "fine_grained_interleaved_index"
logger = logging.getLogger(__name__)
OFFLOAD, PREFETCH = "offload", "backward_prefetch"  # attributes the compiler reads


def mark_row_parts(lm: CausalLM) -> None:
    """Mark the cuts and joins of all layers that compute rows in parts."""
    for number, layer in enumerate(lm.model.layers):
        if not isinstance(layer, FineGrainInterleavedLayer):
            continue
        cuts = [part.slice for part in (*layer.behind, *(layer.beside if layer.cuts else ()))]
        for cut in cuts:
            cut.add_prim_attr(BLOCK, number)
        joins = [] if layer.first else [layer.join_query, layer.join_key, layer.join_value]
        if joins:
            layer.join_query.add_prim_attr(BLOCK, number)
        if layer.joins:
            joins.append(layer.join)  # without a number: followed by a gather or a Send, it would wait for itself
        for operator in (*joins, *cuts):
            operator.add_prim_attr(SKIP_REDISTRIBUTION, True)


# Cell reuse on one CPU: layers that are alike are traced and optimised once, which takes a third off a first start.


def reuse_equal_layers(layers: Sequence[nn.Cell], plan: LayerPlan, config: RunConfig) -> None:
    """Mark ``layers`` (one cell per layer of the plan) as copies if specification and recomputation are equal.

    It is what ``mindspore.lazy_inline(policy="front")`` does, the policy the CPU back end can run; its key for equal cells
    is made when a cell is built, though, and does not know the operators that are recomputed.
    """
    model = config.model.config
    for layer, spec, assignment in zip(layers, model.architecture.layers, plan.layers, strict=True):
        layer.no_inline = False
        layer.cell_init_args = f"DecoderLayer {model!r} {spec!r} {assignment.recompute} {assignment.patterns}"


def split_into_parts(model: nn.Cell, mesh: Mesh, balanced: bool = False) -> None:
    """Make one operator of the cells that compute a device's own part, experts of sorted tokens and attention in a ring, for the
    rank of the parallel context.

    ``balanced``: rows are sent in the numbers of a router that spreads them evenly, regardless of its choices.
    """
    _split_grouped_experts(model, mesh, balanced)
    _split_ring_attention(model, mesh)


def _split_ring_attention(model: nn.Cell, mesh: Mesh) -> None:
    """Make one operator of the attention of each layer whose keys rotate over devices."""
    cells = [cell for _, cell in model.cells_and_names() if isinstance(cell, RingAttention)]
    if not cells:
        return
    rank = ms.get_auto_parallel_context("global_rank")
    ranks = mesh.ranks_along(CONTEXT, rank)
    group = group_of(ranks)
    for cell in cells:
        cell.split(group, ranks.index(rank))
        for exchange in cell.exchanges():
            mark_ranks(exchange.exchange, ranks)


def _split_grouped_experts(model: nn.Cell, mesh: Mesh, balanced: bool = False) -> None:
    """Make one operator of the experts of each layer."""
    cells = [cell for _, cell in model.cells_and_names() if isinstance(cell, GroupedFeedForward)]
    if not cells:
        return
    rank = ms.get_auto_parallel_context("global_rank")
    ranks = mesh.expert_ranks(rank)
    group = group_of(ranks) if len(ranks) > 1 else ""
    for cell in cells:
        cell.split(group, len(ranks), ranks.index(rank), balanced)
        if len(ranks) > 1:
            for operator in cell_operators(cell.exchanging).values():
                if "group" in operator.attrs:
                    mark_ranks(operator, ranks)


def apply_swap(layers: Sequence[nn.Cell], plan: LayerPlan, config: RunConfig) -> None:
    """Mark the results of ``layers`` that move to the host. Recomputation must be marked before.

    Raises:
        UserError: a pattern matches nothing, or only recomputed results.
    """
    for number, (layer, assignment) in enumerate(zip(layers, plan.layers, strict=True)):
        for pattern, prefetch in config.swap_config.of_layer(number).items():
            if assignment.recompute:
                message = f"layer {number} is fully recomputed and saves nothing that could be moved"
                raise config.error("swap_config", f"{message}; leave it out here or in recompute_config.recompute")
            named = _named(layer, pattern, config)
            saved = {path: operator for path, operator in named.items() if not operator.attrs.get(OPERATOR)}
            if not saved:
                message = f"'{pattern}' names results that layer {number} recomputes and does not save"
                raise config.error("swap_config.op_swap", f"{message}; leave it out here or in recompute_config")
            for operator in saved.values():
                operator.add_prim_attr(OFFLOAD, True)
                operator.add_prim_attr(PREFETCH, prefetch)
            logger.info("Set swap at layer %d: %s", number, ", ".join(saved) if pattern else "all saved results")


def _named(layer: nn.Cell, pattern: str, config: RunConfig) -> Mapping[str, Primitive]:
    """Return operators by path: those of the whole layer, or those that ``pattern`` matches."""
    if not pattern:
        return operators(layer)
    try:
        items = match_some(layer, pattern, operators_only=False)
    except ValueError as error:
        raise config.error("swap_config.op_swap", str(error)) from None
    named: dict[str, Primitive] = {}
    for item in items:
        inside = {"": item.target} if isinstance(item.target, Primitive) else operators(item.target)
        named |= {f"{item.path}.{name}".rstrip("."): operator for name, operator in inside.items()}
    return named
