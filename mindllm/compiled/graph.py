"""A compiled rank as typed nodes, read from MindIR, MindSpore's exchange format (protobuf ``mind_ir.proto``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

COLLECTIVES = frozenset({"AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "Broadcast", "Send", "Receive"})
BACKWARD = "Gradients/"
REFERENCE = "REF::"


@dataclass(frozen=True)
class Node:
    """One operator: what it is, where in the model it came from, what it yields."""

    op: str
    name: str
    inputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    scope: str
    attributes: Mapping[str, Any]
    primal: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backward(self) -> bool:
        """Whether it is part of a gradient. A recomputed forward operator is not."""
        return self.scope.startswith(BACKWARD)

    @property
    def recomputed(self) -> bool:
        """Whether it repeats a forward operator for the backward pass."""
        return bool(self.primal.get("duplicated", False))

    @property
    def path(self) -> str:
        """Names of the cells around it, outermost first: ``model.layers.0.attention.wq``."""
        levels = self.scope.removeprefix(BACKWARD).split("/")[1:-1]
        return ".".join(level.rsplit("-", 1)[0] for level in levels)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks a collective exchanges data between."""
        return tuple(self.attributes.get("group_rank_ids", ()))


@dataclass(frozen=True)
class Function:
    """A graph: the top one, or one that nodes call by name."""

    name: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class CompiledGraph:
    """The training step of one rank after the parallel compiler's front end."""

    rank: int
    functions: tuple[Function, ...]
    parameters: Mapping[str, tuple[int, ...]]

    def nodes(self) -> Iterator[Node]:
        """The nodes of all functions, each function once."""
        for function in self.functions:
            yield from function.nodes

    def find(self, op: str, where: Callable[[Node], bool] = lambda node: True) -> list[Node]:
        """Nodes of one kind of operator that satisfy a condition."""
        return [node for node in self.nodes() if node.op == op and where(node)]

    def collectives(self) -> list[Node]:
        """Every operator that exchanges data with other ranks."""
        return [node for node in self.nodes() if node.op in COLLECTIVES]


def parse_mind_ir(data: bytes, rank: int) -> CompiledGraph:
    """Reads a graph from MindIR."""
    from mindspore.train import mind_ir_pb2

    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(data)
    primitives = {primitive.name: primitive for primitive in model.primitives}
    attributes = {name: _attributes(primitive.attribute) for name, primitive in primitives.items()}
    graphs = [model.graph, *model.functions]
    functions = tuple(Function(graph.name, tuple(_nodes(graph, primitives, attributes))) for graph in graphs)
    parameters = {_local(parameter.name): tuple(parameter.dims) for parameter in model.graph.parameter}
    return CompiledGraph(rank, functions, parameters)


def _nodes(graph: Any, primitives: Mapping[str, Any], attributes: Mapping[str, dict[str, Any]]) -> Iterator[Node]:
    for node in graph.node:
        reference = node.op_type.removeprefix(REFERENCE)
        op = primitives[reference].op_type if reference in primitives else node.op_type
        yield Node(
            op=op,
            name=node.name or node.output[0],
            inputs=tuple(node.input),
            shapes=tuple(_shapes(node.attribute)),
            scope=node.domain,
            attributes=attributes.get(reference, {}),
            primal=_attributes([*node.primal_attr, *node.node_attr]),
        )


def _shapes(attributes: Iterable[Any]) -> Iterator[tuple[int, ...]]:
    for attribute in attributes:
        if attribute.name == "shape":
            for holder in (attribute, *attribute.values):
                yield from (tuple(tensor.dims) for tensor in holder.tensors)


def _attributes(attributes: Iterable[Any]) -> dict[str, Any]:
    return {attribute.name: _value(attribute) for attribute in attributes}


def _value(attribute: Any) -> Any:
    kind = attribute.AttributeType.Name(attribute.type)
    if kind in ("TUPLE", "LIST"):
        return tuple(_value(value) for value in attribute.values)
    if kind == "STRING":
        return attribute.s.decode()
    if kind == "BOOL":
        return bool(attribute.ints[0] if attribute.ints else attribute.i)
    if kind in ("FLOAT", "DOUBLE"):
        return attribute.f if kind == "FLOAT" else attribute.d
    if attribute.ints:
        return attribute.ints[0]
    return attribute.i


def _local(name: str) -> str:
    return name.rsplit(":", 1)[-1]
