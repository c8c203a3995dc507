"""What all commands ask of an operator: where in the model it belongs, in which part of a step it runs, its neighbours."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache

from mindllm.compiled.graph.compiled_graph import CONSTANT, CompiledGraph, Node, TensorType

FORWARD, BACKWARD, RECOMPUTED, UPDATE = "forward", "backward", "recomputed", "update"
PHASES = (FORWARD, RECOMPUTED, BACKWARD, UPDATE)
WRAPPERS = frozenset({"network", "_backbone", "net", "backbone", "micro_cells", "policy"})
REFERENCE = "reference."  # begins places in the model that a policy is compared with; it has no backward pass
COPYING = frozenset({"Cast", "AllGather"})
UNIQUE, FORWARD_UNIQUE = "unique_id", "forward_unique_id"
OF_BACKWARD = "is_bp"  # of calls and exchanges of a pipeline
RECOMPUTED_CELL = "recompute_"
LAYER = re.compile(r"(.*?\.)?\w*layers?\.(\d+)(?:\.|$)")
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
    def laid_out(self) -> Mapping[str, list[Node]]:
        """Operators whose inputs have a layout with named axes, by kind."""
        found = defaultdict(list)
        for node in self.nodes:
            if node.attributes.get("in_layout"):
                found[node.op].append(node)
        return found

    @cached_property
    def function_of(self) -> Mapping[str, str]:
        """The function each node is in."""
        return {node.name: function.name for function in self.graph.functions for node in function.nodes}

    @cached_property
    def forwards(self) -> Mapping[str, Node]:
        """Forward operators by the number their gradients, and in reused cells their repetitions, refer to them by."""
        numbered = (node for node in self.nodes if UNIQUE in node.primal and not self.repeats(node))
        return {str(node.primal[UNIQUE]): node for node in numbered}

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """Places by that number: in reused cells an operator that is repeated loses its cell, the repetition keeps it."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if UNIQUE in node.primal:
                number = str(node.primal[UNIQUE])
                found[number] = max(found.get(number, ""), place_of(node), key=len)
        return found

    @cached_property
    def users(self) -> Mapping[str, list[Node]]:
        """For each name, the nodes that use it."""
        found = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return found

    def graph_of(self, node: Node) -> str:
        """Return the forward function of a node: its own, or that of its backward function."""
        name = self.function_of[node.name]
        return self._forward_functions.get(name, name)

    @cached_property
    def _forward_functions(self) -> Mapping[str, str]:
        return {name: forward for forward, backward in self.graph.backward_of.items() for name in backward}

    def times(self, node: Node) -> int:
        """Run per step."""
        return self.graph.executions[self.function_of[node.name]]

    def forward(self, node: Node) -> Node | None:
        """Return the forward operator of a gradient."""
        return self.forwards.get(str(node.primal.get(FORWARD_UNIQUE, "")))

    def place(self, node: Node) -> str:
        """Return its cell without wrappers, ``model.layers.0.attention.wq``; for a gradient that of its forward operator."""
        forward = self.forward(node)
        known = self._places.get(str((forward or node).primal.get(UNIQUE, "")))
        return known or place_of(forward or node)

    def repeats(self, node: Node) -> bool:
        """Return True if it repeats a forward operator. In reused cells, operators that the compiler inserts have no mark."""
        in_backward_pass = self.function_of[node.name] in self._forward_functions
        return node.recomputed or (
            in_backward_pass and UNIQUE in node.primal and node.scope.startswith(RECOMPUTED_CELL)
        )

    def phase(self, node: Node) -> str:
        """In which part of a step it runs."""
        if self.repeats(node):
            return RECOMPUTED
        marked = node.backward or FORWARD_UNIQUE in node.primal or node.primal.get(OF_BACKWARD)
        if marked or self.function_of[node.name] in self._forward_functions:
            return BACKWARD
        return UPDATE if UPDATING & set(node.path.split(".")) else FORWARD

    @cached_property
    def forward_in_layers(self) -> tuple[tuple[Node, int, str], ...]:
        """The operators of the forward pass inside layers, with the number of the layer and the rest of their place."""
        found = []
        for node in self.nodes:
            place = self.place(node)
            if self.phase(node) == FORWARD and not place.startswith(REFERENCE) and (where := layer_of(place)):
                found.append((node, *where))
        return tuple(found)

    def weight(self, node: Node) -> str:
        """Return the weight that it gathers, or whose gradient it exchanges; "" if that is unknown."""
        named = node.attributes.get("mirror_user_id") or node.primal.get("mirror_user_id")
        return str(named) if named else self.parameter(node.inputs[0]).removeprefix("accu_grads.")

    def parameter(self, name: str) -> str:
        """Return the parameter that a name is, or of which it is a converted or gathered copy; "" if there is none."""
        while True:
            kind = self.graph.types.get(name)
            if isinstance(kind, TensorType) and kind.parameter:
                return kind.parameter
            source = self.named.get(name)
            if source is None or source.op not in ORDERING | COPYING or not source.inputs:
                return ""
            name = source.inputs[0]

    def producers(self, node: Node) -> Iterator[Node]:
        """Return the operators that compute its inputs, across those that pass values on."""
        for name in node.inputs:
            yield from self.origins(name)

    def origins(self, name: str) -> Iterator[Node]:
        """Return the operators that compute a name, across those that pass values on."""
        waiting = [name]
        for current in waiting:
            source = self.named.get(current)
            if source is not None and source.op in ORDERING:
                passed = source.inputs if source.op == "MakeTuple" else source.inputs[:1]
                waiting += (inner for inner in passed if inner not in waiting)
            elif source is not None:
                yield source

    def consumers(self, node: Node) -> Iterator[Node]:
        """Return the operators that use its output, across those that pass values on."""
        waiting = [node.name]
        for name in waiting:
            for user in self.users.get(name, ()):
                if user.op not in ORDERING:
                    yield user
                elif (user.op == "MakeTuple" or user.inputs[0] == name) and user.name not in waiting:
                    waiting.append(user.name)


def is_flagged(node: Node) -> bool:
    """Return True if an operator is marked for recomputation, or is in a marked cell that does not exclude it."""
    asked = node.attributes.get("recompute")
    if isinstance(asked, bool):
        return asked or node.marked_for_recompute
    return node.marked_for_recompute or node.scope.startswith(RECOMPUTED_CELL)


def place_of(node: Node) -> str:
    """Return the cells around a node, without wrappers of a network and ``Grad_…``."""
    return _unwrapped(node.path)


@lru_cache(1 << 16)
def _unwrapped(path: str) -> str:
    levels = [level for level in path.split(".") if level and not level.startswith("Grad_")]
    while levels and (levels[0] in WRAPPERS or (levels[0].isdigit() and len(levels) > 1)):
        levels.pop(0)
    return ".".join(levels)


def without_numbers(place: str) -> str:
    """``model.layers.3.attention`` as ``model.layers.*.attention``: alike layers together."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place)


def layer_of(place: str) -> tuple[int, str] | None:
    """Number of the decoder layer a place is in, and the rest of the path: ``layers.3.attention.wq`` is 3, ``attention.wq``."""
    found = LAYER.match(place)
    return (int(found.group(2)), place[found.end() :]) if found else None
