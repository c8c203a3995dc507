"""The cut of every trained weight, read off the sharding table by the operator that reads the weight.

The tests hold it to the layouts that MindSpore's compiler gives the weights.
"""

from __future__ import annotations

from dataclasses import replace

from mindspore import Parameter, nn

from mindllm.architecture.optimizer_state import MUON
from mindllm.config import RunConfig
from mindllm.models import CausalLM
from mindllm.models.experts.expert_load import is_probe
from mindllm.models.experts.grouped_experts import ExpertMatrices
from mindllm.parallel.layout import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_RANKS,
    TENSOR,
    Dimension,
    Layout,
    Mesh,
    dimension_axes,
    mesh_of,
)
from mindllm.parallel.sharding.cells import sharding_table
from mindllm.parallel.sharding.table import Table, is_shared_by_optimizer
from mindllm.parallel.weight_cut import WeightCut, optimizer_shards

READERS: dict[str, tuple[tuple[str, int], ...]] = {
    "weight": (("matmul", 1), ("norm", 1)),
    "bias": (("bias_add", 1), ("norm", 2)),
    "embedding_weight": (("gather", 0),),
    "lora_a": (("down", 1),),
    "lora_b": (("up", 1),),
    "lora_e": (("values", 1),),
    "lora_magnitude": (("divide", 0),),
}
"""By attribute of a cell that is a weight: the operator of the cell that reads it, and as which of its inputs."""
UNIT_ROWS = ("unit_rows.square", 0)
"""What reads the head's weight where its rows are divided by their lengths."""
SORTED_TOKENS = {"w1": 3, "w3": 4, "w2": 5}
"""Where tokens are sorted one operator reads the matrices of all experts: as which of its inputs, by their cell."""


def weight_cuts(model: CausalLM, config: RunConfig) -> dict[str, WeightCut]:
    """Return the cut of every trained weight by name. Where devices are replicas only the optimizer cuts.

    Raises:
        UserError: a weight whose cut is not known.
    """
    mesh = mesh_of(config)
    splits = mesh.model_parallel * mesh.expert_parallel > 1
    table = sharding_table(model, config.parallel_config) if splits else {}
    cuts: dict[str, WeightCut] = {}
    for path, cell in model.cells_and_names():
        for name, weight in cell.parameters_and_names(expand=False):
            if weight.requires_grad and not is_probe(weight.name) and weight.name not in cuts:
                layout = _layout(path, cell, name, table) if splits else (None,) * len(weight.shape)
                cuts[weight.name] = _cut(config, mesh, weight, layout)
    return cuts


def _layout(path: str, cell: nn.Cell, name: str, table: Table) -> Layout | None:
    """Return the layout in which the operator that reads a weight requires it."""
    attribute = name.rpartition(".")[2]
    if path == "lm_head" and UNIT_ROWS[0] in table:
        return table[UNIT_ROWS[0]].inputs[UNIT_ROWS[1]]
    for operator, place in READERS.get(attribute, ()):
        if (entry := table.get(f"{path}.{operator}")) is not None and place < len(entry.inputs):
            return entry.inputs[place]
    if isinstance(cell, ExpertMatrices):
        around, _, attribute = path.rpartition(".")
        return table[f"{around}.on_parts"].inputs[SORTED_TOKENS[attribute]]
    return None


def _cut(config: RunConfig, mesh: Mesh, weight: Parameter, layout: Layout | None) -> WeightCut:
    shape = tuple(weight.shape)
    groups = mesh.expert_parallel if layout and layout[0] == EXPERT else 1
    ways = [1 if dimension == EXPERT else _ways(mesh, dimension) for dimension in layout or ()]
    split = [place for place, count in enumerate(ways) if count != 1]
    if layout is None or 0 in ways or len(split) > 1:
        pet = config.model.config.pet_config
        message = f"needs to know how {weight.name} is cut over devices, and does not"
        if pet is None or config.optimizer.type == MUON:
            raise config.error("optimizer.type", f"{message} (value {config.optimizer.type}); write AdamW")
        message = f"{message} (value {pet.pet_type}); write pet_type: lora, or full"
        raise config.error("model.model_config.pet_config.pet_type", message)
    dimension = split[0] if split else None
    count = 1 if dimension is None else ways[dimension]
    cut = WeightCut(shape, dimension, count, 1, mesh.stage_device_num, groups)
    if not is_shared_by_optimizer(weight):
        return cut
    return replace(cut, shards=optimizer_shards(config, mesh, cut.part_shape, count * groups))


def _ways(mesh: Mesh, dimension: Dimension) -> int:
    """Return the number of neighbors with different parts of a dimension, 0 for ranks that are not neighbors."""
    sizes = {**mesh.expert_axes, **mesh.axes}
    axes = [axis for axis in dimension_axes(dimension) if sizes[axis] > 1]
    if axes == [EXPERT_RANKS]:
        return sizes[EXPERT_RANKS]
    if any(axis not in mesh.axes for axis in axes):
        return 0
    if not axes or axes == [TENSOR]:
        return mesh.model_parallel if axes else 1
    everyone = [axis for axis in (DATA, CONTEXT, TENSOR) if mesh.axes[axis] > 1]
    return mesh.stage_device_num if axes == everyone else 0
