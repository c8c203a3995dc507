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
    """Layouts of an operator's tensor inputs and, where the compiler requires it, of its output.

    ``named``: layouts are passed to the compiler by names of axes, because integers cannot express copies along an outer axis.
    With the output's layout the operator computes on its parts without communication: a sum over split dimensions would be that
    of one part, which only maxima that are exchanged later may be.
    """

    inputs: tuple[Layout, ...]
    output: Layout | None = None
    named: bool = False


TUPLE_OPERATOR = "Concat"  # its tensors are one input, a tuple
REQUIRES_OUTPUT = frozenset({TUPLE_OPERATOR, "ReduceMean"})
"""Operators whose output layout the compiler does not derive from named axes. It equals that of the input."""
SELF_DEFINED = "self_define_shard"
NOT_SPLIT = (ROUTER_BIAS, VALUES)
"""Ends of the names of trained weights that no optimizer cuts, because their updates need the whole weight."""
SPLIT_INTO_PARTS = (GroupedFeedForward, RingAttention)
PARTS = "Morph"
"""The operator that represents others that compute a device's own part. It has layouts, they do not."""

Table = dict[str, Sharding]
"""Shardings by path, such as ``model.layers.0.attention.wq.matmul``."""


def on(*inputs: Layout, out: Layout | None = None, named: bool = False) -> Sharding:
    """Return the sharding with these layouts of the inputs."""
    return Sharding(inputs, out, named)


def apply_sharding(model: nn.Cell, table: Mapping[str, Sharding], mesh: Mesh) -> None:
    """Shard every operator of ``model`` according to ``table``.

    Raises:
        ValueError: an entry that matches no operator, an operator without an entry, or layouts the mesh cannot hold.
    """
    inside = tuple(f"{path}." for path, cell in model.cells_and_names() if isinstance(cell, SPLIT_INTO_PARTS))
    sharded = {
        path: operator
        for path, operator in operators(model).items()
        if operator.name == PARTS or not path.startswith(inside)
    }
    for path in table:
        if path not in sharded:
            raise ValueError(f"sharding table: '{path}' matches no operator{nearest(path, sharded)}")
    for path, operator in sharded.items():
        if operator.name in FOLLOWERS:
            continue
        if path not in table:
            raise ValueError(f"sharding table: 0 entries for operator '{path}'; there must be one")
        _shard(path, operator, table[path], mesh)
    for parameter in model.get_parameters():
        if not is_shared_by_optimizer(parameter):
            parameter.parallel_optimizer = False


def is_shared_by_optimizer(parameter: Parameter) -> bool:
    """Return True if the parallel optimizer may cut a weight: an optimizer has state for it and does not need it whole."""
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
    if operator.name in REQUIRES_OUTPUT:
        output = sharding.inputs[0]
    if operator.name in REQUIRES_OUTPUT or (sharding.named and output is not None):
        operator.add_prim_attr(SELF_DEFINED, True)
    if operator.name == TUPLE_OPERATOR:
        inputs = (inputs,)
    operator.shard(inputs, None if output is None else (mesh.named(output),))
