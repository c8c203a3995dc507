"""Ranks of a stage out of a few that were compiled, where their graphs are proved to differ in nothing but numbers of ranks.

Of each stage the first rank is compiled, its neighbour along every axis, and the last rank. Axes are those of dense parts and of
experts at once: where 16 replicas share experts by 8, a rank is in one of 2 groups, and one of 8 in it. What a number in the
graph gains along an axis (a rank in a group, the peer of a Send, the offset of a slice) is what the neighbour has more than the
first rank. The last rank is what proves the rule: predicted from the first one, it must be the compiled one, node by node,
parameter by parameter. A stage where it is not, or where anything else differs between the ranks, is compiled as a whole.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindllm.compiled.graph.compiled_graph import (
    CONSTANT,
    ClosureType,
    CompiledGraph,
    Function,
    Input,
    Node,
    Parameter,
    TupleType,
    ValueType,
    groups_of,
)
from mindllm.parallel.layout import MODEL_GROUP, Mesh, model_group_name

NAMES_OF_GROUP = ("group", "group_back")
RANKS_OF_NAME, RANKS_TEXT = "group_rank_ids", "group_ranks"
NUMBER_OF_NAME = re.compile(r"^\d+-\d+")  # size and hash of the ranks; an operator's name may follow
NAME_OF_OWN = re.compile(rf"^\d+-{MODEL_GROUP}-\d+$")  # of a group that the model has itself
IDENTITIES = frozenset({"unique_id", "forward_unique_id", "forward_comm_node_unique_id"})
FUSED_WITH = "related_fusion_key"  # reduce_scatter_2-16453000547691086251_1: the exchange, its group, which message
NAME_OF_GROUP = re.compile(r"\d+-\d+")
FORWARD_NAME = (
    "forward_node_name"  # AllReduce_241684: a gradient's forward operator, and how many names there were before
)
NAME_AND_NUMBER = re.compile(r"(.*_)(\d+)")


class NotDerivable(Exception):
    """Ranks differ in what no rule is known for; says in what."""


def sample_of(mesh: Mesh, stage: int) -> tuple[int, ...]:
    """Return the ranks of a stage to compile: the first, its neighbor along every shared axis, and the last."""
    first = stage * mesh.stage_device_num
    neighbours = [first + step for step, _ in _steps(mesh)]
    return tuple(dict.fromkeys((first, *neighbours, first + mesh.stage_device_num - 1)))


def _steps(mesh: Mesh) -> list[tuple[int, int]]:
    """Ax with several ranks inside a stage, the outermost first: how far apart neighbours are, and how many there are.

    They are the coarsest that both views of the devices are made of; those of dense parts where one view cuts across the other.
    """
    views = [_distances(axes) for axes in (mesh.axes, mesh.expert_axes)]
    distances = sorted({*views[0], *views[1]})
    if any(outer % inner for inner, outer in itertools.pairwise(distances)):
        distances = sorted(views[0])
    return [(inner, outer // inner) for inner, outer in itertools.pairwise(distances)][::-1]


def _distances(axes: Mapping[str, int]) -> set[int]:
    """Return the distance of neighbors along each axis, and the number of ranks; ``axes`` from the outermost on."""
    return {1, *itertools.accumulate([*axes.values()][::-1], operator.mul)}


def derived(mesh: Mesh, stage: int, compiled: Mapping[int, CompiledGraph]) -> dict[int, CompiledGraph]:
    """Return the graphs of all other ranks of a stage, whose sample is ``compiled``.

    Raises:
        NotDerivable: the rule does not hold.
    """
    sample = [compiled[rank] for rank in sample_of(mesh, stage)]
    rule = _Rule(mesh, sample, _names_of_groups(compiled.values()))
    last = sample[-1]
    _require_same(rule.predict(last.rank), last)
    first = sample[0].rank
    others = set(range(first, first + mesh.stage_device_num)) - {graph.rank for graph in sample}
    return {rank: rule.predict(rank) for rank in sorted(others)}


class _Rule:
    """What every leaf of the first graph gains along each axis."""

    def __init__(self, mesh: Mesh, sample: Sequence[CompiledGraph], names: Mapping[Hashable, str]) -> None:
        self.names = names
        self.first = sample[0]
        self.constants = _constants(self.first)
        self.steps = _steps(mesh)
        neighbours = [next(graph for graph in sample if graph.rank == self.first.rank + step) for step, _ in self.steps]
        for graph in sample:
            _require_same_structure(self.first, graph)
        self.leaves = list(zip(_leaves(self.first), *map(_leaves, neighbours), strict=True))

    def predict(self, rank: int) -> CompiledGraph:
        """Return the graph of a rank of the stage."""
        steps = [(rank - self.first.rank) // step % size for step, size in self.steps]
        predicted = iter([self._leaf(leaf, steps) for leaf in self.leaves])
        functions = tuple(self._function(function, predicted) for function in self.first.functions)
        parameters = {
            name: _of_parameter(parameter, next(predicted)) for name, parameter in self.first.parameters.items()
        }
        return replace(self.first, rank=rank, functions=functions, parameters=parameters, groups=groups_of(functions))

    def _function(self, function: Function, predicted: Iterator[Mapping[str, Any]]) -> Function:
        """Return the function with predicted nodes. New constants come before their use."""
        nodes: list[Node] = []
        for node in function.nodes:
            nodes += [node] if node.op == CONSTANT else _with_leaves(node, next(predicted), self.constants)
        return replace(function, nodes=tuple(nodes))

    def _leaf(self, leaf: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> Mapping[str, Any]:
        """Return the leaf of a node or parameter; the first rank's one if nothing differs."""
        first, *neighbours = leaf
        if all(_equal(first, other) for other in neighbours):
            return first
        return self._attributes(first, neighbours, steps)

    def _attributes(self, first: Mapping, others: Sequence[Mapping], steps: Sequence[int]) -> Mapping[str, Any]:
        if any(first.keys() != other.keys() for other in others):
            raise NotDerivable("operators with other attributes")
        found = {
            name: self._value(name, value, [other[name] for other in others], steps) for name, value in first.items()
        }
        if RANKS_OF_NAME in found:
            ranks = found[RANKS_OF_NAME]
            differing = [name for name in NAMES_OF_GROUP if any(other.get(name) != first.get(name) for other in others)]
            found |= {name: self._name(ranks, first[name]) for name in differing}
            if RANKS_TEXT in found:
                found[RANKS_TEXT] = "-".join(map(str, ranks))
        return found

    def _value(self, name: str, first: Any, others: Sequence[Any], steps: Sequence[int]) -> Any:
        if all(_equal(first, other) for other in others):
            return first
        kinds = {type(value) for value in (first, *others)}
        if kinds == {int}:
            return first + sum(step * (other - first) for step, other in zip(steps, others, strict=True))
        if kinds == {tuple} and all(len(other) == len(first) for other in others):
            columns = zip(*others, strict=True)
            return tuple(self._value(name, item, column, steps) for item, column in zip(first, columns, strict=True))
        if kinds == {np.ndarray} and all(_are_numbers(first, other) for other in others):
            gained = sum(step * (other - first) for step, other in zip(steps, others, strict=True))
            return np.asarray(first + gained, first.dtype)
        if issubclass(kinds.pop(), Mapping) and not kinds:
            return self._attributes(first, others, steps)
        if name in (*NAMES_OF_GROUP, RANKS_TEXT):
            return first  # follows from the ranks
        other = next(value for value in others if not _equal(value, first))
        raise NotDerivable(f"{name} {_told(first)} is {_told(other)} elsewhere")

    def _name(self, ranks: tuple[int, ...], first: str) -> str:
        """Return the model's name of a group of ranks, or the compiler's if it was compiled on some rank, else a new one."""
        if NAME_OF_OWN.match(first):
            return model_group_name(ranks)
        kind = _kind(first)
        return self.names.get((ranks, kind), f"{len(ranks)}-derived-{'-'.join(map(str, ranks))}{kind}")


def _told(value: Any) -> str:
    """Say a value in a few words; of an array the first number."""
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{value.dtype} {list(value.shape)} that begins with {value.flat[0]:.6g}"
    return f"{value!r:.60}"


def _names_of_groups(graphs: Iterator[CompiledGraph] | Any) -> dict[Hashable, str]:
    """Names of groups by their ranks and what follows the hash in the name."""
    found: dict[Hashable, str] = {}
    for graph in graphs:
        for name, ranks in graph.groups.items():
            if found.setdefault((ranks, _kind(name)), name) != name:
                raise NotDerivable(f"groups {name} and {found[ranks, _kind(name)]} of the same ranks {ranks}")
    return found


def _kind(name: str) -> str:
    return NUMBER_OF_NAME.sub("", name, count=1)


def _constants(graph: CompiledGraph) -> dict[str, Node]:
    return {node.name: node for node in graph.nodes() if node.op == CONSTANT}


def _leaves(graph: CompiledGraph) -> Iterator[Mapping[str, Any]]:
    """Return what may differ between ranks: attributes and constants of nodes, layouts and initial values of parameters.

    Equal constants of a graph are one, so that ranks have more or fewer of them; they count where they are used.
    """
    constants = _constants(graph)
    for node in graph.nodes():
        if node.op != CONSTANT:
            used = tuple(constants[name].value if name in constants else () for name in node.inputs)
            yield {"attributes": node.attributes, "constants": used}
    for parameter in graph.parameters.values():
        yield _leaves_of_parameter(parameter)


def _leaves_of_parameter(parameter: Parameter) -> Mapping[str, Any]:
    layout, beginning = parameter.layout, {"initial": parameter.initial, "begins": parameter.begins}
    if layout is None:
        return beginning
    of_group = (
        {RANKS_OF_NAME: layout.optimizer_ranks, "group": layout.optimizer_group} if layout.optimizer_group else {}
    )
    return {**beginning, **of_group}


def _with_leaves(node: Node, leaf: Mapping[str, Any], constants: Mapping[str, Node]) -> list[Node]:
    """Return the node with these attributes and constants, after the constants that are new."""
    new, inputs = [], list(node.inputs)
    for place, (name, value) in enumerate(zip(node.inputs, leaf["constants"], strict=True)):
        if name in constants and value is not constants[name].value:
            inputs[place] = f"{node.name}:constant_{place}"
            new.append(replace(constants[name], name=inputs[place], value=value))
    if not new and leaf["attributes"] is node.attributes:
        return [node]
    return [*new, replace(node, inputs=tuple(inputs), attributes=leaf["attributes"])]


def _of_parameter(parameter: Parameter, leaf: Mapping[str, Any]) -> Parameter:
    layout = parameter.layout
    if layout is not None and layout.optimizer_group:
        layout = replace(layout, optimizer_group=leaf["group"], optimizer_ranks=leaf[RANKS_OF_NAME])
    return replace(parameter, layout=layout, initial=leaf["initial"], begins=leaf["begins"])


@dataclass
class _Numbered:
    """Names in the order in which they appear: two graphs that are equal up to names have equal numbers."""

    numbers: dict[Hashable, int]

    def __call__(self, name: Hashable) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def _structure(graph: CompiledGraph) -> Iterator[Hashable]:
    """Return a graph without its leaves and without the names that the compiler numbers."""
    number, constants = _Numbered({}), _constants(graph)

    def used(name: str) -> Hashable:
        return _type(constants[name].type, number) if name in constants else number(name)

    for name, parameter in graph.parameters.items():
        layout = parameter.layout and replace(parameter.layout, optimizer_group="", optimizer_ranks=())
        yield name, number(parameter.node), parameter.shape, parameter.dtype, layout
    for function in graph.functions:
        yield number(function.name), tuple(_input(item, number) for item in function.inputs), _marks(function)
        for node in function.nodes:
            if node.op == CONSTANT:
                continue
            yield (
                node.op,
                number(node.name),
                tuple(map(used, node.inputs)),
                _type(node.type, number),
                node.scope,
                _primal(node, number),
                number(node.callee),
                node.instance,
            )
        yield repr(constants[function.output].value) if function.output in constants else number(function.output)


def _input(item: Input, number: Callable[[Hashable], int]) -> Hashable:
    return number(item.name), _type(item.type, number)


def _marks(function: Function) -> str:
    return repr({name: value for name, value in function.attributes.items() if name != "compile_phase"})


def _type(kind: ValueType, number: Callable[[Hashable], int]) -> Hashable:
    if isinstance(kind, ClosureType):
        return tuple(map(number, kind.names))
    return tuple(_type(item, number) for item in kind.items) if isinstance(kind, TupleType) else kind


def _primal(node: Node, number: Callable[[Hashable], int]) -> Hashable:
    def known(name: str, value: Any) -> Hashable:
        if name in IDENTITIES:
            return number((name.endswith("comm_node_unique_id"), value))
        if name == FUSED_WITH:
            return NAME_OF_GROUP.sub(lambda found: str(number((FUSED_WITH, found.group()))), str(value))
        if name == FORWARD_NAME and (numbered := NAME_AND_NUMBER.fullmatch(str(value))):
            return numbered[1], number((FORWARD_NAME, value))
        return repr(value)

    return tuple((name, known(name, value)) for name, value in sorted(node.primal.items()))


def _require_same_structure(one: CompiledGraph, other: CompiledGraph) -> None:
    counts = [sum(node.op != CONSTANT for node in graph.nodes()) for graph in (one, other)]
    if counts[0] != counts[1] or len(one.functions) != len(other.functions):
        raise NotDerivable(f"rank {one.rank} has {counts[0]} operators, rank {other.rank} {counts[1]}")
    for mine, its in zip(_structure(one), _structure(other), strict=True):
        if mine != its:
            raise NotDerivable(f"rank {one.rank} and rank {other.rank} differ in {mine!r:.80}")


def _require_same(predicted: CompiledGraph, found: CompiledGraph) -> None:
    """Their structure is the same already."""
    for mine, its in zip(_leaves(predicted), _leaves(found), strict=True):
        if not _equal(mine, its):
            name, said, is_there = _first_difference("", mine, its)
            raise NotDerivable(
                f"rank {found.rank} is not what its neighbours say: {name} {is_there!r:.60}, not {said!r:.60}"
            )


def _first_difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the innermost name of the first leaf that differs, and both values. Names of groups come last."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for key in sorted(one, key=lambda key: key in (*NAMES_OF_GROUP, RANKS_TEXT)):
            if not _equal(one[key], other[key]):
                return _first_difference(str(key), one[key], other[key])
    return name, one, other


def _equal(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout."""
    if one is other:
        return True
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _are_numbers(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and np.issubdtype(one.dtype, np.integer)
