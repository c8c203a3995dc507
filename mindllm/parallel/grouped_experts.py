"""Experts of sorted tokens on their devices: what each computes of its own part, and with whom it shares the experts."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from mindllm.models.experts.grouped_experts import GroupedFeedForward
from mindllm.parallel.communication_groups import group_of, mark_ranks
from mindllm.parallel.layout import Mesh
from mindllm.parallel.operators import operators_of


def split_grouped_experts(model: nn.Cell, mesh: Mesh) -> None:
    """Makes one operator of the experts of each layer, for the rank of the parallel context."""
    cells = [cell for _, cell in model.cells_and_names() if isinstance(cell, GroupedFeedForward)]
    if not cells:
        return
    rank = ms.get_auto_parallel_context("global_rank")
    ranks = mesh.expert_ranks(rank)
    group = group_of(ranks) if len(ranks) > 1 else ""
    for cell in cells:
        cell.split(group, len(ranks), ranks.index(rank))
        if cell.is_shared:
            for operator in operators_of(cell.shared).values():
                if "group" in operator.attrs:
                    mark_ranks(operator, ranks)
