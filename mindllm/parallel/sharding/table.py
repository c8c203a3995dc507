"""Layouts by operator path, and their application to the operators of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspore import Parameter, nn
from mindspore.ops import Primitive

from mindllm.architecture.adapters import VALUES
from mindllm.errors import nearest
from mindllm.models.attention.ring_attention import RingAttention
from mindllm.models.experts.expert_load import ROUTER_BIAS, is_probe
from mindllm.models.experts.grouped_experts import GroupedFeedForward
from mindllm.parallel.layout import Layout, Mesh
from mindllm.parallel.operators import operators

FOLLOWERS = frozenset({"Cast", "Reshape"})
"""Operators without an entry: the compiler gives them the layouts of their neighbours."""


@dataclass(frozen=True)
class Sharding:
    """Layouts of an operator's tensor inputs and, where the compiler must be told, of its output.

    ``named``: they are given to the compiler by the names of axes, for integers cannot express copies along an outer axis. With
    that of the output the operator computes on its parts as they are, and exchanges nothing: a sum over split dimensions would be
    that of a part alone, which only maxima that are exchanged later may be.
    """

    inputs: tuple[Layout, ...]
    output: Layout | None = None
    named: bool = False


OF_SEVERAL = "Concat"  # the operator whose tensors are one input, a tuple
NEEDS_TO_BE_TOLD = frozenset({OF_SEVERAL, "ReduceMean"})
"""Operators of which the compiler derives nothing from named axes: the output's layout, that of the input, is told, too."""
TOLD = "self_define_shard"
NOT_SPLIT = (ROUTER_BIAS, VALUES)
"""Ends of the names of weights that are trained and that no optimizer cuts: what changes them must know them as a whole."""
SPLIT_INTO_PARTS = (GroupedFeedForward, RingAttention)
PARTS = "Morph"
"""The operator that stands for others, which compute what each device has: they have no layouts, it has."""

Table = dict[str, Sharding]
"""Shardings by path, such as ``model.layers.0.attention.wq.matmul``."""


def on(*inputs: Layout, out: Layout | None = None, named: bool = False) -> Sharding:
    """The sharding with these layouts of the inputs."""
    return Sharding(inputs, out, named)


def apply_sharding(model: nn.Cell, table: Mapping[str, Sharding], mesh: Mesh) -> None:
    """Shards every operator of ``model`` as ``table`` says.

    Raises:
        ValueError: an entry that matches no operator, an operator without an entry, or layouts the mesh cannot hold.
    """
    inside = tuple(f"{path}." for path, cell in model.cells_and_names() if isinstance(cell, SPLIT_INTO_PARTS))
    found = {path: one for path, one in operators(model).items() if one.name == PARTS or not path.startswith(inside)}
    for path in table:
        if path not in found:
            raise ValueError(f"sharding table: '{path}' matches no operator{nearest(path, found)}")
    for path, operator in found.items():
        if operator.name in FOLLOWERS:
            continue
        if path not in table:
            raise ValueError(f"sharding table: 0 entries for operator '{path}'; there must be one")
        _shard(path, operator, table[path], mesh)
    for parameter in model.get_parameters():
        if not is_shared_by_optimizer(parameter):
            parameter.parallel_optimizer = False


def is_shared_by_optimizer(parameter: Parameter) -> bool:
    """Whether the parallel optimizer may cut it: an optimizer holds something of it, and need not know it as a whole."""
    return parameter.requires_grad and not is_probe(parameter.name) and not parameter.name.endswith(NOT_SPLIT)


def _shard(path: str, operator: Primitive, sharding: Sharding, mesh: Mesh) -> None:
    if sharding.named:
        _shard_by_name(operator, sharding, mesh)
        return
    layouts = sharding.inputs if sharding.output is None else (*sharding.inputs, sharding.output)
    try:
        mesh.check(layouts)
    except ValueError as error:
        if not mesh.shares_sequences:
            raise ValueError(f"sharding of '{path}': {error}") from None
        _shard_by_name(operator, sharding, mesh)
        return
    inputs = tuple(mesh.strategy(layout) for layout in sharding.inputs)
    if sharding.output is None:
        operator.shard(inputs)
    else:
        operator.shard(inputs, (mesh.strategy(sharding.output),))


def _shard_by_name(operator: Primitive, sharding: Sharding, mesh: Mesh) -> None:
    inputs: tuple = tuple(map(mesh.named, sharding.inputs))
    output = sharding.output
    if operator.name in NEEDS_TO_BE_TOLD:
        output = sharding.inputs[0]
    if operator.name in NEEDS_TO_BE_TOLD or (sharding.named and output is not None):
        operator.add_prim_attr(TOLD, True)
    if operator.name == OF_SEVERAL:
        inputs = (inputs,)
    operator.shard(inputs, None if output is None else (mesh.named(output),))
