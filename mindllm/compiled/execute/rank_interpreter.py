"""One rank as a generator: walks its program, and yields at every exchange with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.execute.assignments import ASSIGNMENTS, CHANGES_STATE, Parameter, loaded
from mindllm.compiled.execute.exchange import Exchange
from mindllm.compiled.execute.kernels import ROUNDED, NoKernel, choose, held, rounded
from mindllm.compiled.graph.compiled_graph import (
    CALL,
    CONSTANT,
    UNKNOWN_SIZE,
    CompiledGraph,
    Function,
    Node,
    TensorType,
)
from mindllm.errors import RunFailed

Value = Any
Run = Generator[Exchange, np.ndarray | None, Value]
Observer = Callable[[int, Node, tuple[Value, ...], Value], None]
"""Told of every computed node: rank, node, operands, result."""
Fault = Callable[[Node, Value], Value]
"""Given every computed node and its result, and returns what goes on in its place."""

DATASET = "GetNext"
PASSES_ON = frozenset({"Depend", "TensorMove", "StopGradient", "MoveTo"})


@dataclass(frozen=True)
class Closure:
    """A function with its first arguments."""

    function: str
    arguments: tuple[Value, ...] = ()


class ShapeMismatch(RunFailed):
    """A result whose shape is not the one the compiler derived: two graphs that do not belong together, or a wrong kernel."""


class RankInterpreter:
    """Executes the graph of one rank on its own parameters.

    Args:
        graph: what it executes.
        parameters: the rank's part of each parameter of the graph, by name; assignments of the graph replace them.
        mindspore_kernels: MindSpore's CPU kernels instead of numpy wherever there is one.
        observer: told of every node, for those who look for a difference.

    ``fault``, where it is set, may change results: what goes wrong on one rank alone. ``dataset`` is what the operator yields by
    which a graph reads its batch itself.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        parameters: Mapping[str, np.ndarray],
        mindspore_kernels: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.graph = graph
        self.rank = graph.rank
        self.parameters = {
            name: Parameter(name, parameters[name], _wide_type(item.dtype)) for name, item in graph.parameters.items()
        }
        self.observer = observer
        self.fault: Fault | None = None
        self.dataset: tuple[np.ndarray, ...] = ()
        self._mindspore_kernels = mindspore_kernels
        self._kernels: dict[str, Callable[..., Value]] = {}
        self._steps = {function.name: _steps_of(function) for function in graph.functions}
        self._globals: dict[str, Value] = {
            **{name: held(value) for name, value in graph.constants.items()},
            **{function.name: Closure(function.name) for function in graph.functions},
            **{parameter.node: self.parameters[name] for name, parameter in graph.parameters.items()},
        }

    def values(self) -> dict[str, np.ndarray]:
        """Return the current arrays of parameters by name. They are never changed in place."""
        return {name: parameter.value for name, parameter in self.parameters.items()}

    def run(self, *inputs: np.ndarray) -> Run:
        """Execute one step; the generator's value is what the step returns."""
        result = yield from self._call(self.graph.step, inputs)
        return loaded(result)

    def _call(self, function: Function, arguments: tuple[Value, ...]) -> Run:
        values = dict(zip((item.name for item in function.inputs), arguments, strict=False))
        for node, last_used in self._steps[function.name]:
            operands = tuple(self._value(name, values) for name in node.inputs)
            values[node.name] = yield from self._execute(node, operands, values)
            for name in last_used:
                values.pop(name, None)
        return self._value(function.output, values)

    def _value(self, name: str, values: Mapping[str, Value]) -> Value:
        if name in values:
            return values[name]
        try:
            return self._globals[name]
        except KeyError:
            raise RunFailed(f"rank {self.rank}: {name} is used before it is known") from None

    def _execute(self, node: Node, operands: tuple[Value, ...], values: Mapping[str, Value]) -> Run:
        if node.op in CONTROL:
            return CONTROL[node.op](operands)
        if node.op == DATASET and self.dataset:
            return self.dataset
        if node.op == CALL:
            closure = self._value(node.callee, values)
            return (yield from self._call(self.graph.function(closure.function), (*closure.arguments, *operands)))
        if node.exchanges:
            operands = tuple(map(loaded, operands))
            result = yield Exchange(self.rank, node, operands[0] if operands else None, operands[1:])
        elif node.op in ASSIGNMENTS:
            result = self._assigned(node, operands)
        else:
            self._refuse_unknown_change(node, operands)
            operands = tuple(map(loaded, operands))
            try:
                result = rounded(self._kernel(node)(*operands), node.dtypes)
            except (NotImplementedError, ValueError, TypeError, IndexError) as error:
                raise NoKernel(
                    f"rank {self.rank}: {node.op} at {node.scope} cannot be computed here: {error}"
                ) from None
            if self.fault is not None:
                result = self.fault(node, result)
        self._check_shapes(node, result)
        if self.observer is not None:
            self.observer(self.rank, node, operands, result)
        return result

    def _assigned(self, node: Node, operands: tuple[Value, ...]) -> Value:
        try:
            return ASSIGNMENTS[node.op](node.attributes, *operands)
        except (AttributeError, IndexError, TypeError, ValueError) as error:  # operands that the operator does not have
            raise NoKernel(f"rank {self.rank}: {node.op} at {node.scope} cannot be computed here: {error}") from None

    def _refuse_unknown_change(self, node: Node, operands: tuple[Value, ...]) -> None:
        """Raise if an operator changes a parameter in an unknown way, instead of treating it as a pure function."""
        changed = [operand.name for operand in operands if isinstance(operand, Parameter)]
        if changed and node.attributes.get(CHANGES_STATE):
            raise NoKernel(
                f"rank {self.rank}: {node.op} at {node.scope} cannot be computed here: nothing here knows how it changes "
                f"{changed[0]}"
            )

    def _kernel(self, node: Node) -> Callable[..., Value]:
        kernel = self._kernels.get(node.name)
        if kernel is None:
            kernel = self._kernels[node.name] = choose(node, self._mindspore_kernels)
        return kernel

    def _check_shapes(self, node: Node, result: Value) -> None:
        derived = node.type
        if isinstance(derived, TensorType) and isinstance(result, np.ndarray) and result.shape == derived.shape:
            return
        found = result if isinstance(result, tuple) else (result,)
        for value, shape in zip(found, node.shapes, strict=False):
            if isinstance(value, np.ndarray) and not _fits(value.shape, shape):
                raise ShapeMismatch(
                    f"rank {self.rank}: {node.op} at {node.scope} yields {list(value.shape)}, "
                    f"the compiler derived {list(shape)}"
                )


def _wide_type(dtype: str) -> np.dtype | None:
    """Return the type of a parameter's values where they are computed with in float32."""
    return ROUNDED[dtype] if dtype == "bfloat16" else None


def _steps_of(function: Function) -> tuple[tuple[Node, tuple[str, ...]], ...]:
    """Return the operators of a function in order, each with the values that are not used afterwards."""
    nodes = [node for node in function.nodes if node.op != CONSTANT]
    last = {name: index for index, node in enumerate(nodes) for name in (node.name, *node.inputs, node.callee) if name}
    last.pop(function.output, None)
    dead: dict[int, list[str]] = {}
    for name, index in last.items():
        dead.setdefault(index, []).append(name)
    return tuple((node, tuple(dead.get(index, ()))) for index, node in enumerate(nodes))


def _fits(found: tuple[int, ...], derived: tuple[int, ...]) -> bool:
    """Return True if a shape matches the compiler's, as far as that is known."""
    return len(found) == len(derived) and all(
        one == other or other == UNKNOWN_SIZE for one, other in zip(found, derived, strict=True)
    )


def _switch(operands: tuple[Value, ...]) -> Value:
    condition, then, otherwise = operands
    return then if bool(loaded(condition)) else otherwise


TELLS = ("Print", "TensorDump", "ScalarSummary", "TensorSummary", "HistogramSummary", "ImageSummary")
"""What tells people of values, and computes nothing: it is left out."""

CONTROL: dict[str, Callable[[tuple[Value, ...]], Value]] = {
    **dict.fromkeys(PASSES_ON, lambda operands: operands[0]),
    "Load": lambda operands: loaded(operands[0]),
    "UpdateState": lambda operands: None,
    **dict.fromkeys(TELLS, lambda operands: None),
    "MakeTuple": lambda operands: operands,
    "MakeList": lambda operands: operands,
    "TupleGetItem": lambda operands: operands[0][operands[1]],
    "Partial": lambda operands: Closure(operands[0].function, operands[0].arguments + operands[1:]),
    "Switch": _switch,
}
