"""A compiled step as one list of operations in the order of execution: calls of functions expanded, values followed to memory.
Each function has the order that ``execution_order`` works out; a function that is called runs as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindllm.compiled.graph.compiled_graph import (
    CALL,
    CONSTANT,
    PARTIAL,
    CompiledGraph,
    Function,
    Node,
    TensorType,
    tensors_of,
)
from mindllm.compiled.graph.execution_order import BRANCHES, execution_order

VIEWS = frozenset({"Reshape", "ExpandDims", "Squeeze", "Flatten"})
"""Operators whose output is the memory of their first input, in another shape."""
IN_PLACE = {"Assign": 1, "AssignAdd": 1, "AssignSub": 1, "InplaceZero": 1, "AdamWeightDecay": 3}
"""Operators that write into their first inputs, and into how many."""


@dataclass(frozen=True)
class Memory:
    """A tensor's memory: ``tensor``, and the operation that writes it, or the parameter or constant that it is."""

    tensor: TensorType
    producer: int = -1
    name: str = ""


@dataclass(frozen=True)
class Closure:
    """A function, with its first inputs bound."""

    function: str
    bound: tuple[Value, ...]


Value = Memory | Closure | tuple | None  # None: scalars of the compiler and tokens that order side effects


@dataclass(frozen=True)
class Operation:
    """One execution of an operator.

    Attributes:
        reads: memory it reads, parameters and constants among it.
        writes: memory that is made for its outputs.
        call: numbers of the calls it stands in, outermost first: the same node runs once per micro-batch.
    """

    node: Node
    reads: tuple[Memory, ...]
    writes: tuple[Memory, ...]
    call: tuple[int, ...] = ()


@dataclass(frozen=True)
class Branch:
    """A branch that was taken: the number of its last operation, and the memory it was given."""

    last: int
    inputs: tuple[Memory, ...]


@dataclass(frozen=True)
class Unrolled:
    """The step: its operations in order, the memory of its inputs and of what it returns, and the branches in it."""

    operations: tuple[Operation, ...]
    inputs: tuple[Memory, ...]
    results: tuple[Memory, ...]
    branches: tuple[Branch, ...] = ()


def unroll(graph: CompiledGraph) -> Unrolled:
    """Expands the step of ``graph``; of a branch the ``then`` side is taken: the update that is not skipped."""
    machine = _Machine(graph)
    inputs = tuple(Memory(kind, name=item.label) for item in graph.step.inputs for kind in tensors_of(item.type))
    result = machine.run(graph.step, inputs, ())
    return Unrolled(tuple(machine.operations), inputs, tuple(memories(result)), tuple(machine.branches))


def memories(value: Value) -> list[Memory]:
    """All memory of a value, what closures hold included."""
    if isinstance(value, Memory):
        return [value]
    if isinstance(value, Closure):
        return [memory for item in value.bound for memory in memories(item)]
    return [memory for item in value or () for memory in memories(item)]


@dataclass
class _Machine:
    graph: CompiledGraph
    operations: list[Operation] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    calls: int = 0

    def __post_init__(self) -> None:
        self.parameters: dict[str, Value] = {
            parameter.node: Memory(TensorType(parameter.shape, parameter.dtype), name=parameter.name)
            for parameter in self.graph.parameters.values()
        }
        self.constants: dict[str, Value] = {
            node.name: Memory(node.tensors[0], name=node.name) if isinstance(node.value, np.ndarray) else None
            for node in self.graph.nodes()
            if node.op == CONSTANT
        }
        self.orders: dict[str, list[Node]] = {}

    def run(self, function: Function, arguments: Sequence[Value], call: tuple[int, ...]) -> Value:
        """Executes a function; returns its output."""
        scope: dict[str, Value] = {**self.constants, **self.parameters}
        scope |= {item.name: value for item, value in zip(function.inputs, arguments, strict=True)}
        for node in self._order(function):
            scope[node.name] = self._value(node, scope, call)
        return self._read(function.output, scope)

    def _order(self, function: Function) -> list[Node]:
        if function.name not in self.orders:
            self.orders[function.name] = execution_order(function)
        return self.orders[function.name]

    def _read(self, name: str, scope: Mapping[str, Value]) -> Value:
        return Closure(name, ()) if self.graph.is_function(name) else scope[name]

    def _value(self, node: Node, scope: Mapping[str, Value], call: tuple[int, ...]) -> Value:
        inputs = [self._read(name, scope) for name in node.inputs]
        match node.op:
            case "Depend" | "Load":
                return inputs[0]
            case "UpdateState":
                return None
            case "MakeTuple":
                return tuple(inputs)
            case "TupleGetItem":
                index = self.graph.constants[node.inputs[1]]
                return inputs[0][index] if isinstance(inputs[0], tuple) else None
            case "Switch":
                return inputs[1]
            case op if op == PARTIAL:
                return _bind(inputs[0], inputs[1:])
            case op if op == CALL:
                return self._call(_bind(self._read(node.callee, scope), inputs), call)
        return self._execute(node, inputs, call)

    def _call(self, closure: Closure, call: tuple[int, ...]) -> Value:
        self.calls += 1
        function = self.graph.function(closure.function)
        result = self.run(function, closure.bound, (*call, self.calls))
        if function.role in BRANCHES:
            self.branches.append(Branch(len(self.operations) - 1, tuple(memories(closure.bound))))
        return result

    def _execute(self, node: Node, inputs: Sequence[Value], call: tuple[int, ...]) -> Value:
        if node.op in VIEWS or (node.op == "Transpose" and self._moves_nothing(node, inputs[0])):
            return inputs[0]
        place = len(self.operations)
        written = IN_PLACE.get(node.op, 0)
        made: tuple[Memory, ...] = (
            () if written else tuple(Memory(tensor, place, str(i)) for i, tensor in enumerate(node.tensors))
        )
        read = tuple(memory for value in inputs for memory in memories(value))
        self.operations.append(Operation(node, read, made, call))
        if written:
            return inputs[0] if isinstance(node.type, TensorType) else tuple(inputs[:written])
        return made[0] if isinstance(node.type, TensorType) else made

    def _moves_nothing(self, node: Node, tensor: Value) -> bool:
        """Whether a transposition moves dimensions of size 1 only: the back end makes a view of it."""
        order = self.graph.constants.get(node.inputs[1])
        if not isinstance(order, tuple) or not isinstance(tensor, Memory):
            return False
        moved = [axis for axis in order if node.tensors[0].shape[order.index(axis)] > 1]
        return moved == sorted(moved)


def _bind(function: Value, inputs: Sequence[Value]) -> Closure:
    if not isinstance(function, Closure):
        raise ValueError("a call of what is no function")
    return Closure(function.function, (*function.bound, *inputs))
