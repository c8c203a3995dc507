"""What a forward pass keeps for the backward pass, and what it would keep without some repeated operators.

A tensor is kept when an operator of the backward pass, or a repetition, reads it. Views share the memory of what they view, so a
Reshape that is kept keeps the operator before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mindllm.compiled.graph.compiled_graph import CALL, PARTIAL, Node, TensorType, tensors_of
from mindllm.compiled.graph.cost import bytes_of
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, ORDERING, RECOMPUTED, UNIQUE, Operators

PASSING = frozenset({"Depend", "Load"})
VIEWS = frozenset({"Reshape", "ExpandDims", "Squeeze"})
WITHOUT_READING = ORDERING - {"TensorMove"} | VIEWS


@dataclass(frozen=True)
class Storage:
    """Memory: an output of a node, or an input of a function."""

    owner: str
    index: int = 0


class KeptTensors:
    """Reads a graph once; answers for any set of repetitions taken away."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._storages: dict[str, Storage | None] = {}

    @cached_property
    def repetitions(self) -> Mapping[str, Node]:
        """The original of every repeated operator, by the name of the repetition."""
        originals = {self._pair(node): node for node in self.operators.nodes if not self.operators.repeats(node)}
        copies = filter(self.operators.repeats, self.operators.nodes)
        return {node.name: originals[self._pair(node)] for node in copies if self._pair(node) in originals}

    def _pair(self, node: Node) -> tuple[Any, ...]:
        """What an operator and its repetition have in common, and no other operator."""
        number = node.primal.get("recompute_id", node.primal.get(UNIQUE, node.name))
        return node.op, number, self.operators.graph_of(node)

    @cached_property
    def _readers(self) -> list[tuple[Node, tuple[Storage, ...]]]:
        """Operators of the backward pass and repetitions, with the memory they read."""
        phases = (BACKWARD, RECOMPUTED)
        readers = [node for node in self.operators.nodes if self.operators.phase(node) in phases]
        return [(node, self.read(node)) for node in readers if node.op not in WITHOUT_READING]

    def read(self, node: Node) -> tuple[Storage, ...]:
        """The memory a node reads."""
        parts: list[str] = []
        for name in node.inputs:
            source = self.operators.named.get(name)
            parts += source.inputs if source is not None and source.op == "MakeTuple" else [name]
        return tuple(storage for storage in map(self.storage, parts) if storage)

    def storage(self, name: str) -> Storage | None:
        """The memory behind a name; None for what is none: parameters, constants, tokens of order."""
        if name not in self._storages:
            self._storages[name] = self._find(name)
        return self._storages[name]

    def kept(self, without: Collection[str] = ()) -> frozenset[Storage]:
        """Memory of the forward pass that is kept, if the repetitions named in ``without`` were not made."""
        found = set()
        for node, storages in self._readers:
            if node.name in without:
                continue
            for storage in storages:
                original = self.repetitions.get(storage.owner) if storage.owner in without else None
                found.add(Storage(original.name, storage.index) if original is not None else storage)
        return frozenset(storage for storage in found if self._of_forward_pass(storage))

    def readers(self, storage: Storage) -> Iterable[Node]:
        """Operators of the backward pass, and repetitions, that read it."""
        return (node for node, storages in self._readers if storage in storages)

    def size(self, storages: Iterable[Storage]) -> int:
        """Bytes."""
        return bytes_of(tensor for storage in storages if (tensor := self.tensor(storage)) is not None)

    def tensor(self, storage: Storage) -> TensorType | None:
        """What lies there."""
        tensors = list(tensors_of(self.operators.graph.types[storage.owner]))
        return tensors[storage.index] if storage.index < len(tensors) else None

    @cached_property
    def bound(self) -> Mapping[str, str]:
        """What inputs of functions are given by their first call, or by the closure of a backward pass."""
        graph, found = self.operators.graph, dict[str, str]()
        for node in self.operators.nodes:
            if node.op not in (CALL, PARTIAL):
                continue
            name, given = (node.callee, node.inputs) if node.op == CALL else (node.inputs[0], node.inputs[1:])
            if graph.is_function(name):
                for bound, value in zip(graph.function(name).inputs, given, strict=False):
                    found.setdefault(bound.name, value)
        return found

    def _find(self, name: str) -> Storage | None:
        node = self.operators.named.get(name)
        while name in self.bound or (node is not None and node.op in PASSING | VIEWS):
            name = self.bound[name] if name in self.bound or node is None else node.inputs[0]
            node = self.operators.named.get(name)
        kind = self.operators.graph.types.get(name)
        if node is None:
            return Storage(name) if isinstance(kind, TensorType) and not kind.parameter else None
        if node.op == "TupleGetItem":
            return self._item(node)
        return Storage(name) if next(iter(tensors_of(node.type)), None) is not None else None

    def _item(self, node: Node) -> Storage | None:
        index = self.operators.graph.constants.get(node.inputs[1], 0)
        source = self.operators.named.get(node.inputs[0])
        while source is not None and source.op in PASSING:
            source = self.operators.named.get(source.inputs[0])
        if source is not None and source.op == "MakeTuple":
            return self.storage(source.inputs[index])
        return Storage(source.name, index) if source is not None else None

    def _of_forward_pass(self, storage: Storage) -> bool:
        """Whether it is an activation, and none of the copies of weights that all micro-batches share."""
        node = self.operators.named.get(storage.owner)
        return (node is None or self.operators.phase(node) == FORWARD) and not self.operators.parameter(storage.owner)
