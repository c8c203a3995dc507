"""Finds the first operator of a cluster whose value is not a part of what a single device computes there.

Operators are matched by the path of their cell, their kind and their direction; values by content, so no layout has to be
known: the value on a rank must be an aligned block of the single device's value. Where an operator yields a part of a sum,
the sum over ranks that share it (or over micro batches) must be one.

Records hold every value that every operator of a cluster yields, and where in the model it stands.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindllm.compiled.execute.rank_interpreter import Parameter
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph, Node
from mindllm.parallel.layout import Mesh

Place = tuple[bool, str, str]
"""Where an operator stands, whatever surrounds the model: backward or not, path of the cell, kind of operator."""

MOVES = frozenset(
    {"Reshape", "Transpose", "Cast", "StridedSlice", "Split", "SplitWithSize", "Concat", "ExpandDims", "Tile"}
)
"""Operators that compute nothing: their value is that of their first operand."""
WRAPPER = "network"
GRADIENTS = "gradients"
LOCAL = frozenset(
    {"AddN", "OneHot", "Equal", "FloorDiv", "Assign", "AssignAdd", "AssignSub", "ZerosLikeExt", "ZerosLike", "IsFinite"}
)
"""Operators whose value on a rank need not be a part of a whole, or that the compiler adds where it likes."""
PARTIAL = frozenset(
    {
        "MatMul",
        "BatchMatMul",
        "Gather",
        "ReduceSum",
        "SumExt",
        "ReduceMax",
        "ReduceMean",
        "RmsNormGrad",
        "UnsortedSegmentSum",
        "FlashAttentionScoreGrad",  # of keys, from the queries of one rank of a sequence
    }
    | {"Add", *COLLECTIVES}
)
"""Operators that may yield a part of a sum (or of a maximum), or pass one on."""
OF_THE_LOSS = ("CausalLM.Grad_", "network.Grad_", "cross_entropy", "losses")
GATHER, SCATTER = "AllGather", "ReduceScatter"
CUTS, JOINS = frozenset({"Split", "SplitTensor"}), frozenset({"Concat"})
UPDATE = "update"
CHECKED_OF_THE_NORM = "Square"  # of a gradient; its sums are divided by the number of copies


@dataclass(frozen=True, eq=False)
class Record:
    """One value of one operator on one rank.

    Attributes:
        operands: the records that its operands are values of; None for those nobody computed.
        parameter: name of the parameter an assignment changes; "" for other operators.
    """

    rank: int
    node: Node
    value: np.ndarray
    operands: tuple[Record | None, ...]
    parameter: str = ""

    @property
    def place(self) -> Place:
        return place_of(self.node)

    @property
    def origin(self) -> Record:
        """The computed value behind moves and exchanges."""
        record = self
        while record.node.op in MOVES | COLLECTIVES and record.operands and record.operands[0] is not None:
            record = record.operands[0]
        return record


class Recorder:
    """An observer that keeps every array, and which operator every operand came from."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._of_array: dict[tuple[int, int], Record] = {}

    def __call__(self, rank: int, node: Node, operands: tuple[Any, ...], result: Any) -> None:
        given = tuple(_flat(operands))
        known = tuple(self._of_array.get((rank, id(operand))) for operand in given)
        parameter = next((operand.name for operand in given if isinstance(operand, Parameter)), "")
        for value in _flat((result,)):
            if isinstance(value, np.ndarray):
                record = Record(rank, node, value, known, parameter)
                self.records.append(record)
                self._of_array[rank, id(value)] = record


def place_of(node: Node) -> Place:
    """Where an operator stands. On a single device the compiler gives all gradients of a kind one path, so it says nothing."""
    levels = itertools.dropwhile(lambda level: level == WRAPPER, node.path.split("."))
    return node.backward, GRADIENTS if node.backward else ".".join(levels), node.op


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


@dataclass(frozen=True)
class Difference:
    """The first operator that differs, and the operand of it that is a part of a sum nobody completed."""

    record: Record
    graph: CompiledGraph
    unfinished: Record | None = None
    over: tuple[int, ...] = ()

    def describe(self) -> str:
        """Operator, rank, scope, strategy, source line, and what is wrong with its operand, if that is known."""
        node = self.record.node
        words = [f"{node.op} on rank {self.record.rank} at {node.scope}", *self._made(self.record)]
        if self.unfinished is not None:
            words += self._operand("its operand is from", self.unfinished.origin)
            words.append(f"that operand was not added over ranks {', '.join(map(str, self.over))}")
        else:
            for operand in filter(None, self.record.operands[:1]):
                words += self._operand("its operand is from", operand)
                if operand.origin is not operand:
                    words += self._operand("which has it from", operand.origin)
        return "\n  ".join(words)

    def _operand(self, how: str, record: Record) -> Iterator[str]:
        target = f" to {record.parameter}" if record.parameter else ""
        yield f"{how} {record.node.op}{target} at {record.node.scope}"
        yield from self._made(record)

    def _made(self, record: Record) -> Iterator[str]:
        """The strategy of an operator, and the line that made it, as far as they are known."""
        if record.node.input_strategy:
            yield f"strategy {record.node.input_strategy}"
        if lines := self.graph.source(record.node):
            yield f"source {lines[-1]}: {lines[-1].text}"


@dataclass
class _Reference:
    """Values of a single device by place."""

    tolerance: float
    records: Mapping[Place, list[Record]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record], tolerance: float) -> _Reference:
        by_place: dict[Place, list[Record]] = defaultdict(list)
        for record in records:
            by_place[record.place].append(record)
        return cls(tolerance, by_place)

    def has(self, place: Place, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of one of the values at ``place``."""
        return any(is_block(value, whole.value, self.tolerance) for whole in self.records.get(place, ()))

    def has_operand(self, place: Place, index: int, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of operand ``index`` of one of the operators at ``place``."""
        operands = [record.operands[index] for record in self.records.get(place, ()) if index < len(record.operands)]
        return any(is_block(value, whole.value, self.tolerance) for whole in operands if whole is not None)


def first_difference(
    records: Sequence[Record],
    reference: Iterable[Record],
    graphs: Sequence[CompiledGraph],
    mesh: Mesh,
    tolerance: float,
) -> Difference | None:
    """The first of a cluster's ``records`` that fits nothing in those of a single device; None where all fit.

    ``tolerance`` is relative to the largest magnitude of a single device's value.
    """
    known = _Reference.of(reference, tolerance)
    groups = _Groups(records, mesh)
    stacked = {graph.rank: set(_stacked(graph)) for graph in graphs}
    for record in records:
        if record.node.name in stacked.get(record.rank, ()):
            continue
        place = record.origin.place if record.node.op in COLLECTIVES else record.place
        if not _is_checked(record) or place not in known.records:
            continue
        if any(known.has(place, value) for value, _ in groups.readings(record)):
            continue
        return _explained(record, known, groups, graphs[record.rank])
    return None


def _stacked(graph: CompiledGraph) -> Iterator[str]:
    """Exchanges whose parts lie on top of each other, whatever dimension is cut: the compiler cuts and joins what is gathered,
    and what is to be scattered, in an operator of its own.
    """
    ops = {node.name: node.op for node in graph.nodes()}
    for node in graph.nodes():
        source = node.inputs[0] if node.inputs else ""
        if node.op in CUTS and ops.get(source) == GATHER:
            yield source
        elif node.op == SCATTER and ops.get(source) in JOINS:
            yield node.name


def is_block(value: np.ndarray, whole: np.ndarray, tolerance: float) -> bool:
    """Whether ``value`` is one of the equal blocks ``whole`` is cut into along some dimensions; NaN equals NaN."""
    if value.ndim != whole.ndim or any(not n or size % n for size, n in zip(whole.shape, value.shape, strict=True)):
        return False
    if value.dtype == bool or whole.dtype == bool:
        return True
    finite = whole[np.isfinite(whole)]
    allowed = tolerance * float(np.max(np.abs(finite), initial=0.0))
    corners = whole[tuple(slice(None, None, n) for n in value.shape)]
    first = value[(0,) * value.ndim]
    for index in np.argwhere(np.isclose(corners, first, rtol=0, atol=allowed, equal_nan=True)):
        block = whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, value.shape, strict=True))]
        if np.allclose(value, block, rtol=0, atol=allowed, equal_nan=True):
            return True
    return False


class _Groups:
    """Values of the same operator on other ranks and in other micro batches.

    Ranks of a stage have the same operators, so of several ones at a place the first is that of another rank's first.
    """

    def __init__(self, records: Iterable[Record], mesh: Mesh) -> None:
        self.mesh = mesh
        self.calls: dict[tuple[int, str, tuple[int, ...]], list[Record]] = defaultdict(list)
        self.nodes: dict[tuple[int, str, str, tuple[int, ...]], list[str]] = defaultdict(list)
        for record in records:
            shape = record.value.shape
            self.calls[record.rank, record.node.name, shape].append(record)
            names = self.nodes[record.rank, record.node.path, record.node.op, shape]
            if record.node.name not in names:
                names.append(record.node.name)

    def readings(self, record: Record) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """The value itself; where it may be a part, what it is together with those of other ranks and micro batches."""
        yield record.value, ()
        if not _may_be_a_part(record):
            return
        for ranks, records in self._together(record):
            values = [other.value for other in records]
            yield (np.maximum.reduce(values) if record.node.op == "ReduceMax" else np.sum(values, axis=0)), ranks

    def operand_sums(self, record: Record, index: int) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """Sums of operand ``index`` over ranks that execute the same operator."""
        for ranks, records in self._together(record):
            operands = [other.operands[index] for other in records if index < len(other.operands)]
            values = [operand.value for operand in operands if operand is not None]
            if len(ranks) > 1 and len(values) == len(records) and len({value.shape for value in values}) == 1:
                yield np.sum(values, axis=0), ranks

    def _ranks(self, rank: int) -> list[tuple[int, ...]]:
        stage = self.mesh.stage_of(rank) * self.mesh.stage_device_num
        whole = tuple(range(stage, stage + self.mesh.stage_device_num))
        along = [self.mesh.ranks_along(axis, rank) for axis in ("tp", "cp", "dp")]
        return list(dict.fromkeys([(rank,), *along, whole]))

    def _together(self, record: Record) -> Iterator[tuple[tuple[int, ...], list[Record]]]:
        """Ranks that may share the value: records of the same call on these ranks, and of all calls."""
        shape, path, op = record.value.shape, record.node.path, record.node.op
        index = self.nodes[record.rank, path, op, shape].index(record.node.name)
        turn = self.calls[record.rank, record.node.name, shape].index(record)
        for ranks in self._ranks(record.rank):
            names = [self.nodes.get((rank, path, op, shape), []) for rank in ranks]
            if any(index >= len(found) for found in names):
                continue
            calls = [self.calls[rank, found[index], shape] for rank, found in zip(ranks, names, strict=True)]
            if len(ranks) > 1 and all(turn < len(found) for found in calls):
                yield ranks, [found[turn] for found in calls]
            if any(len(found) > 1 for found in calls):
                yield ranks, [call for found in calls for call in found]


def _explained(record: Record, known: _Reference, groups: _Groups, graph: CompiledGraph) -> Difference:
    """The difference, and the operand that fits only together with those of other ranks."""
    for index, operand in enumerate(record.operands):
        if operand is None or record.node.op in COLLECTIVES:
            continue
        if ranks := _missing_sum(record, index, known, groups) or _missing_sum_of(operand.origin, known, groups):
            return Difference(record, graph, operand, ranks)
    return Difference(record, graph)


def _missing_sum(record: Record, index: int, known: _Reference, groups: _Groups) -> tuple[int, ...]:
    """Ranks whose sum of this operand is what the operator has for one on a single device; none if it needs no sum."""
    operand = record.operands[index]
    if operand is None or known.has_operand(record.place, index, operand.value):
        return ()
    sums = groups.operand_sums(record, index)
    return next((ranks for value, ranks in sums if known.has_operand(record.place, index, value)), ())


def _missing_sum_of(origin: Record, known: _Reference, groups: _Groups) -> tuple[int, ...]:
    """The same of the value an operand was cut from."""
    if origin.place not in known.records or known.has(origin.place, origin.value):
        return ()
    readings = groups.readings(origin)
    return next((ranks for value, ranks in readings if len(ranks) > 1 and known.has(origin.place, value)), ())


def _is_checked(record: Record) -> bool:
    _, path, op = record.place
    if path == "" or op in MOVES | LOCAL or record.origin.node.op in LOCAL:
        return False
    if path.startswith(UPDATE) and ".optimizer" not in path and op != CHECKED_OF_THE_NORM:
        return False
    return np.issubdtype(record.value.dtype, np.floating)


def _may_be_a_part(record: Record) -> bool:
    """Whether the operator may yield a part of a sum. The gradient of the loss begins divided by the number of its copies."""
    node = record.node
    return node.op in PARTIAL or (node.backward and any(part in node.path for part in OF_THE_LOSS))
