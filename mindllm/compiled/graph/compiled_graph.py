"""A compiled rank as typed values: functions of nodes, their types, parameters and how they are laid out over devices.

``mind_ir.py`` reads it from MindSpore's exchange format, ``file.py`` keeps it, ``schedule.py`` reads the order of
micro-batches from it. Whoever executes a graph needs what :class:`Node` says about calls and constants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from mindllm.compiled.graph.sources import SourceLine, Sources
from mindllm.parallel.parameter_layout import ParameterLayout

IN_LENGTHS = "AlltoAllV"
"""The exchange that reads on the host how much it sends to each rank, and how much comes of each."""
COLLECTIVES = frozenset(
    {"AllReduce", "AllGather", "ReduceScatter", "AlltoAll", IN_LENGTHS, "Broadcast", "Send", "Receive"}
)
UNKNOWN_SIZE = -1
"""A dimension that is known when the step runs: rows that a router sends."""
BACKWARD, GRADIENT_OF = "Gradients/", "Grad_"
CALL, CONSTANT, PARTIAL = "Call", "Constant", "Partial"
ROLES = {"▸": "forward", "◂": "backward", "✓": "then", "✗": "else"}


@dataclass(frozen=True, slots=True)
class TensorType:
    """What a tensor is: ``shape`` on this rank, ``dtype`` by numpy's name (or ``bfloat16``).

    ``parameter`` names the parameter whose memory it is, as for the result of an assignment.
    """

    shape: tuple[int, ...]
    dtype: str
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class TupleType:
    """Several values under one name, taken apart by ``TupleGetItem``."""

    items: tuple[ValueType, ...]


@dataclass(frozen=True)
class ClosureType:
    """A function with some inputs bound: the names of the functions, or of the ``Partial`` nodes, it can be."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class OtherType:
    """Anything else by MindIR's name: ``UMONAD`` and ``IOMONAD`` (tokens that order side effects), ``INT64``, ``NONE``."""

    kind: str


ValueType = TensorType | TupleType | ClosureType | OtherType


@dataclass(frozen=True, slots=True)
class Node:
    """One operator: what it is, where in the model it came from, what it yields.

    Attributes:
        op: operator, such as ``MatMul``; ``Constant`` (see ``value``), ``Call`` (see ``callee``), or ``Partial``, whose first
            input is the name of a function or of a closure and whose others are the first inputs of that function.
        name: name of its one output, unique in the whole graph; other nodes use it as an input.
        inputs: names of nodes, of inputs of the function, of functions, or of constants, which may stand in another function.
        type: type of the output.
        scope: cells around it, as MindSpore writes them: ``Gradients/Default/network-SeededLoss/…/MatMul-op0``.
        attributes: of the operator: group, strategies, ``transpose_a`` and the like.
        primal: of the node: ``micro``, ``recompute``, ``forward_unique_id``, …
        callee: of a ``Call``, the name of a function, or of the node or input whose closure is called.
        value: of a ``Constant``: a number, a string, a tuple, None, a numpy array, or the OtherType of a monad.
        instance: MindSpore's name of the operator: that of the model's attribute, or why the compiler put it there, as
            ``redistribution_op_…`` or ``parallel_optimizer_allgather_…``.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    type: ValueType
    scope: str
    attributes: Mapping[str, Any]
    primal: Mapping[str, Any] = field(default_factory=dict)
    callee: str = ""
    value: Any = None
    instance: str = ""

    @property
    def tensors(self) -> tuple[TensorType, ...]:
        """The tensors it yields, those inside tuples too."""
        return tuple(tensors_of(self.type))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Their shapes."""
        return tuple(tensor.shape for tensor in self.tensors)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Their dtypes."""
        return tuple(tensor.dtype for tensor in self.tensors)

    @property
    def backward(self) -> bool:
        """Whether it is part of a gradient. A recomputed forward operator is not."""
        return self.scope.startswith(BACKWARD)

    @property
    def marked_for_recompute(self) -> bool:
        """Whether it is a forward operator, or its repetition, that recomputation was asked for."""
        return bool(self.primal.get("recompute", False))

    @property
    def recomputed(self) -> bool:
        """Whether it repeats a forward operator for the backward pass."""
        return bool(self.primal.get("duplicated", False))

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch it belongs to, where the compiler says so."""
        return self.primal.get("micro")

    @property
    def path(self) -> str:
        """Names of the cells around it, outermost first: ``model.layers.0.attention.wq``."""
        return _path_in(self.scope)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks a collective exchanges data between."""
        return tuple(self.attributes.get("group_rank_ids", ()))

    @property
    def exchanges(self) -> bool:
        """Whether it needs other ranks: a known collective operator, or any that names a group."""
        return self.op in COLLECTIVES or bool(self.ranks)

    @property
    def input_strategy(self) -> tuple[tuple[int, ...], ...] | None:
        """Into how many parts each dimension of each input was cut, if somebody said so."""
        return self.attributes.get("in_strategy") or _parts(self.attributes.get("in_layout"))

    @property
    def output_strategy(self) -> tuple[tuple[int, ...], ...] | None:
        """The same of each output."""
        return self.attributes.get("out_strategy") or _parts(self.attributes.get("out_layout"))


def _parts(layouts: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the parts of layouts that name axes. Several tensors that are one input form a tuple."""
    if layouts is None:
        return None
    found: list[tuple[int, ...]] = []
    for layout in layouts:
        if isinstance(layout, Mapping):
            found.append(tuple(_cuts(layout["device_matrix"], axis) for axis in layout["tensor_map"]))
        else:
            found.extend(_parts(layout) or ())
    return tuple(found)


def _cuts(devices: Sequence[int], axis: int | Sequence[int]) -> int:
    """Return the number of parts of a dimension that is split over one or several axes, counted from the right; -1: not split."""
    axes = (axis,) if isinstance(axis, int) else axis
    return math.prod(devices[-1 - axis] for axis in axes if axis >= 0)


@dataclass(frozen=True)
class Input:
    """An input of a function, by the name its nodes use."""

    name: str
    type: ValueType

    @property
    def label(self) -> str:
        """Its name in the source, without the function."""
        return local_name(self.name)


@dataclass(frozen=True)
class Function:
    """A graph: the top one (the step), or one that nodes call by name.

    Attributes:
        nodes: each behind the nodes it uses; not the order of execution.
        inputs: without parameters, which the top function alone has besides.
        output: name of the node, input, constant or function it returns.
        attributes: the compiler's marks, such as ``cell_reuse``.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    output: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """What it is: ``forward`` or ``backward`` of a reused cell, ``then`` or ``else`` of a branch, or ``step``."""
        marks = [mark for mark in self.name if mark in ROLES]
        return ROLES[marks[0]] if marks else "step"

    @property
    def cell(self) -> str:
        """The method it was made of, as module and class: ``mindllm_parallel_pipeline_ReusedNetwork_construct``."""
        pieces = self.name.rpartition("_")[0].lstrip("0123456789_▸◂✓✗↓")
        return pieces.split("CR_")[-1]


@dataclass(frozen=True)
class Parameter:
    """A tensor that outlives the step: a weight, optimizer state, an accumulated gradient, a table.

    Attributes:
        node: the name that nodes of the top function use.
        shape: of the part this rank keeps.
        layout: how the whole is cut; None where MindSpore has none (scalars, a single device).
        initial: what the whole tensor begins with, a scalar where all of it is equal; None for weights, which are drawn, and
            where it is unknown.
        begins: how a weight of a run that begins is made, as :func:`mindllm.compiled.graph.initial.beginnings` has it; None of
            others, and where it is unknown.
    """

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: str
    layout: ParameterLayout | None = None
    initial: np.ndarray | None = field(default=None, repr=False, compare=False)
    begins: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class CompiledGraph:
    """The training step of one rank after the parallel compiler's front end.

    Attributes:
        functions: the step first.
        groups: global ranks of every communication group, in the order of their parts.
        sources: source lines by scope, see ``source``.
        mind_ir: what it was read from.
    """

    rank: int
    functions: tuple[Function, ...]
    parameters: Mapping[str, Parameter]
    groups: Mapping[str, tuple[int, ...]]
    sources: Sources = field(default_factory=dict, repr=False)
    mind_ir: bytes = field(default=b"", repr=False, compare=False)

    @property
    def step(self) -> Function:
        """The top function: one optimizer step."""
        return self.functions[0]

    @cached_property
    def _functions(self) -> dict[str, Function]:
        return {function.name: function for function in self.functions}

    def function(self, name: str) -> Function:
        """Return a function by name."""
        return self._functions[name]

    def is_function(self, name: str) -> bool:
        """Return True if a name belongs to a function."""
        return name in self._functions

    @cached_property
    def types(self) -> Mapping[str, ValueType]:
        """Types of whatever a node can have as an input: nodes, inputs of functions, parameters."""
        parameters = self.parameters.values()
        return {
            **{held.node: TensorType(held.shape, held.dtype, held.name) for held in parameters},
            **{given.name: given.type for function in self.functions for given in function.inputs},
            **{node.name: node.type for node in self.nodes()},
        }

    def input_tensors(self, node: Node) -> tuple[TensorType, ...]:
        """Return the tensors that a node reads."""
        return tuple(tensor for name in node.inputs for tensor in tensors_of(self.types.get(name, OtherType("NONE"))))

    @cached_property
    def executions(self) -> Mapping[str, int]:
        """How often a step runs each function: once for each call of it or of a closure of it; where no call says which closure
        it is of, once for each closure made.

        Both branches of a condition count, though a step takes one; a loop counts once.
        """
        mentions = {function.name: Counter(self._mentioned(function)) for function in self.functions}
        times = {self.step.name: 1}

        def count(name: str) -> int:
            if name not in times:
                times[name] = 1  # met again on the way here, it is a loop
                times[name] = sum(called[name] * count(caller) for caller, called in mentions.items() if called[name])
            return times[name]

        return {function.name: max(1, count(function.name)) for function in self.functions}

    def _mentioned(self, function: Function) -> Iterator[str]:
        called = self._called_closures
        for node in function.nodes:
            names = (node.callee,) if node.op == PARTIAL and node.inputs[0] in called else (node.callee, *node.inputs)
            yield from (name for name in names if self.is_function(name))
        for name, callers in called.items():
            yield from [name] * callers[function.name]

    @cached_property
    def _called_closures(self) -> Mapping[str, Counter[str]]:
        """Functions whose closures are called, by name: how often by each function."""
        made = {node.name: node.inputs[0] for node in self.nodes() if node.op == PARTIAL}
        found: dict[str, Counter[str]] = {}
        for function in self.functions:
            for node in function.nodes:
                kind = self.types.get(node.callee) if node.op == CALL else None
                for name in kind.names if isinstance(kind, ClosureType) else ():
                    if self.is_function(target := made.get(name, "")):
                        found.setdefault(target, Counter())[function.name] += 1
        return found

    @cached_property
    def constants(self) -> Mapping[str, Any]:
        """Values of constants by name. They are shared by all functions."""
        return {node.name: node.value for node in self.nodes() if node.op == CONSTANT}

    @cached_property
    def backward_of(self) -> Mapping[str, tuple[str, ...]]:
        """For each forward function of a reused cell, the names of its backward functions: of the whole pass, and where the
        schedule has the gradients of weights apart of either half.
        """
        found: dict[str, tuple[str, ...]] = {}
        for function in self.functions:
            for node in function.nodes:
                if node.op == PARTIAL and self.is_function(node.inputs[0]):
                    target = self.function(node.inputs[0])
                    if (function.role, target.role) == ("forward", "backward"):
                        found[function.name] = (*found.get(function.name, ()), target.name)
        return found

    @cached_property
    def _forward_scopes(self) -> dict[str, str]:
        """Scopes of forward operators by the number that their gradients refer to them by."""
        return {node.primal["unique_id"]: node.scope for node in self.nodes() if "unique_id" in node.primal}

    @cached_property
    def _cell_sources(self) -> dict[str, tuple[SourceLine, ...]]:
        """Of each cell inside the step, by its scope, the source of its last operator that has one."""
        cells = {scope.rpartition("/")[0]: lines for scope, lines in self.sources.items()}
        return {cell: lines for cell, lines in cells.items() if "/" in cell}

    def source(self, node: Node) -> tuple[SourceLine, ...]:
        """Return the calls that led to an operator, the innermost last; empty if they are unknown.

        A gradient has those of its forward operator; what the compiler inserted, those of the cell it serves.
        """
        forward = self._forward_scopes.get(node.primal.get("forward_unique_id", ""), "")
        cell = node.scope.removeprefix(BACKWARD).rpartition("/")[0]
        before, _, last = cell.rpartition("/")
        cell = before if last.startswith(GRADIENT_OF) else cell
        return self.sources.get(node.scope) or self.sources.get(forward) or self._cell_sources.get(cell, ())

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes of all functions, each function once."""
        for function in self.functions:
            yield from function.nodes

    def find(self, op: str, where: Callable[[Node], bool] = lambda node: True) -> list[Node]:
        """Return the nodes of one kind of operator that satisfy a condition."""
        return [node for node in self.nodes() if node.op == op and where(node)]

    def collectives(self) -> list[Node]:
        """Every operator that exchanges data with other ranks."""
        return [node for node in self.nodes() if node.op in COLLECTIVES]


def groups_of(functions: Iterable[Function]) -> dict[str, tuple[int, ...]]:
    """Global ranks of the communication groups that nodes name."""
    return {
        node.attributes["group"]: node.ranks
        for function in functions
        for node in function.nodes
        if node.ranks and "group" in node.attributes
    }


def tensors_of(kind: ValueType) -> Iterator[TensorType]:
    """Return the tensors of a value in order, including those inside tuples."""
    if isinstance(kind, TensorType):
        yield kind
    elif isinstance(kind, TupleType):
        for item in kind.items:
            yield from tensors_of(item)


@lru_cache(1 << 16)  # the operators of a cell have few scopes, and are asked for theirs again and again
def _path_in(scope: str) -> str:
    levels = scope.removeprefix(BACKWARD).split("/")[1:-1]
    return ".".join(level.rsplit("-", 1)[0] for level in levels)


def local_name(name: str) -> str:
    """Return a name inside its function: ``f:model.norm_out.weight`` is ``model.norm_out.weight``."""
    return name.rsplit(":", 1)[-1].lstrip("▸◂")
