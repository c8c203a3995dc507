"""What all commands ask of an operator: where in the model it belongs, in which part of a step it runs, its neighbours."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property

from mindllm.compiled.graph import CONSTANT, CompiledGraph, Node, TensorType

FORWARD, BACKWARD, RECOMPUTED, UPDATE = "forward", "backward", "recomputed", "update"
PHASES = (FORWARD, RECOMPUTED, BACKWARD, UPDATE)
WRAPPERS = frozenset({"network", "_backbone", "net", "backbone", "micro_cells"})
UPDATING = frozenset({"update", "optimizer"})
ORDERING = frozenset({"Depend", "Load", "UpdateState", "MakeTuple", "TupleGetItem", "Return", "TensorMove"})
"""Operators that pass a value on, or only order others."""


class Operators:
    """A graph with the places and neighbours of its operators. ``nodes`` leaves constants out."""

    def __init__(self, graph: CompiledGraph) -> None:
        self.graph = graph

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.graph.nodes() if node.op != CONSTANT)

    @cached_property
    def named(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def function_of(self) -> Mapping[str, str]:
        """The function each node is in."""
        return {node.name: function.name for function in self.graph.functions for node in function.nodes}

    @cached_property
    def forwards(self) -> Mapping[str, Node]:
        """Forward operators by the number their gradients refer to them by."""
        return {str(node.primal["unique_id"]): node for node in self.nodes if "unique_id" in node.primal}

    @cached_property
    def users(self) -> Mapping[str, list[Node]]:
        """For each name, the nodes that use it."""
        found = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return found

    def graph_of(self, node: Node) -> str:
        """The forward function a node belongs to: its own, or that of its backward function."""
        name = self.function_of[node.name]
        return self._forward_functions.get(name, name)

    @cached_property
    def _forward_functions(self) -> Mapping[str, str]:
        return {backward: forward for forward, backward in self.graph.backward_of.items()}

    def times(self, node: Node) -> int:
        """Runs per step."""
        return self.graph.executions[self.function_of[node.name]]

    def forward(self, node: Node) -> Node | None:
        """The operator a gradient is of."""
        return self.forwards.get(str(node.primal.get("forward_unique_id", "")))

    def place(self, node: Node) -> str:
        """The cell it belongs to, without wrappers: ``model.layers.0.attention.wq``; of a gradient, that of its operator."""
        forward = self.forward(node)
        return place_of(forward if forward is not None else node)

    def phase(self, node: Node) -> str:
        """In which part of a step it runs."""
        if node.recomputed:
            return RECOMPUTED
        if node.backward or "forward_unique_id" in node.primal:
            return BACKWARD
        return UPDATE if UPDATING & set(node.path.split(".")) else FORWARD

    def weight(self, node: Node) -> str:
        """The weight that it gathers, or whose gradient it exchanges; "" where that cannot be told."""
        named = node.attributes.get("mirror_user_id") or node.primal.get("mirror_user_id")
        return str(named) if named else self._parameter(node.inputs[0]).removeprefix("accu_grads.")

    def _parameter(self, name: str) -> str:
        """The parameter behind a name, past conversions; "" if there is none."""
        kind = self.graph.types.get(name)
        if isinstance(kind, TensorType) and kind.parameter:
            return kind.parameter
        source = self.named.get(name)
        passes = source is not None and (source.op in ORDERING or source.op == "Cast") and source.inputs
        return self._parameter(source.inputs[0]) if source is not None and passes else ""

    def producers(self, node: Node) -> Iterator[Node]:
        """The operators that made its inputs, past those that pass values on."""
        for name in node.inputs:
            yield from self.origins(name)

    def origins(self, name: str) -> Iterator[Node]:
        """The operators behind a name, past those that pass values on."""
        source = self.named.get(name)
        if source is None:
            return
        if source.op in ORDERING:
            passed = source.inputs if source.op == "MakeTuple" else source.inputs[:1]
            for inner in passed:
                yield from self.origins(inner)
        else:
            yield source

    def consumers(self, node: Node) -> Iterator[Node]:
        """The operators that use its output, past those that pass values on."""
        for user in self.users.get(node.name, ()):
            if user.op not in ORDERING:
                yield user
            elif user.op == "MakeTuple" or user.inputs[:1] == (node.name,):
                yield from self.consumers(user)


def place_of(node: Node) -> str:
    """The cells around a node, without those that only wrap a network and without ``Grad_…``."""
    levels = [level for level in node.path.split(".") if level and not level.startswith("Grad_")]
    while levels and (levels[0] in WRAPPERS or (levels[0].isdigit() and len(levels) > 1)):
        levels.pop(0)
    return ".".join(levels)


def without_numbers(place: str) -> str:
    """``model.layers.3.attention`` as ``model.layers.*.attention``: alike layers together."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place)
