"""Finds the first operator of a cluster whose value is not a part of what a single device computes there.

Operators are matched by the path of their cell, their kind and their direction; values by content, so no layout has to be
known: the value on a rank must be an aligned block of the single device's value. Where an operator yields a part of a sum,
the sum over ranks that share it (or over micro batches) must be one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindllm.compiled.graph import COLLECTIVES, CompiledGraph, Node
from mindllm.parallel.layout import Mesh

Place = tuple[bool, str, str]
"""Where an operator stands, whatever surrounds the model: backward or not, path of the cell, kind of operator."""

MOVES = frozenset(
    {"Reshape", "Transpose", "Cast", "StridedSlice", "Split", "SplitWithSize", "Concat", "ExpandDims", "Tile"}
)
"""Operators that compute nothing: their value is that of their first operand."""
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
    }
    | {"Add", *COLLECTIVES}
)
"""Operators that may yield a part of a sum (or of a maximum), or pass one on."""
WRAPPER = "network"
GRADIENTS = "gradients"
OF_THE_LOSS = ("CausalLM.Grad_", "network.Grad_", "cross_entropy", "losses")
UPDATE = "update"
CHECKED_OF_THE_NORM = "Square"  # of a gradient; its sums are divided by the number of copies


@dataclass(frozen=True, eq=False)
class Record:
    """One value of one operator on one rank. ``origin`` is the record whose value it moves or exchanges."""

    rank: int
    node: Node
    value: np.ndarray
    operands: tuple[Record | None, ...]
    number: int

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
        known = tuple(self._of_array.get((rank, id(operand))) for operand in _flat(operands))
        for value in _flat((result,)):
            if isinstance(value, np.ndarray):
                record = Record(rank, node, value, known, len(self.records))
                self.records.append(record)
                self._of_array[rank, id(value)] = record


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
        words = [f"{node.op} on rank {self.record.rank} at {node.scope}"]
        if node.input_strategy:
            words.append(f"strategy {node.input_strategy}")
        words += [f"source {line}" for line in _source(self.graph, node)]
        if self.unfinished is not None:
            ranks = ", ".join(map(str, self.over))
            words.append(f"its operand from {_where(self.unfinished.origin)} was not added over ranks {ranks}")
        else:
            words += [f"its operand is from {_where(operand)}" for operand in self.record.operands[:1] if operand]
        return "; ".join(words)


@dataclass
class _Reference:
    """Values of a single device by place."""

    tolerance: float
    values: Mapping[Place, list[np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record], tolerance: float) -> _Reference:
        values: dict[Place, list[np.ndarray]] = defaultdict(list)
        for record in records:
            values[record.place].append(record.value)
        return cls(tolerance, values)

    def has(self, place: Place, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of one of the values at ``place``."""
        return any(is_block(value, whole, self.tolerance) for whole in self.values.get(place, ()))


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
    for record in records:
        place = record.origin.place if record.node.op in COLLECTIVES else record.place
        if not _is_checked(record) or place not in known.values:
            continue
        if any(known.has(place, value) for value, _ in groups.readings(record)):
            continue
        return _explained(record, known, groups, graphs[record.rank])
    return None


def place_of(node: Node) -> Place:
    """Where an operator stands. On a single device the compiler gives all gradients of a kind one path, so it says nothing."""
    levels = itertools.dropwhile(lambda level: level == WRAPPER, node.path.split("."))
    return node.backward, GRADIENTS if node.backward else ".".join(levels), node.op


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
        for ranks in self._ranks(record.rank):
            for values in self._together(record, ranks):
                yield (np.maximum.reduce(values) if record.node.op == "ReduceMax" else np.sum(values, axis=0)), ranks

    def _ranks(self, rank: int) -> list[tuple[int, ...]]:
        stage = self.mesh.stage_of(rank) * self.mesh.stage_devices
        whole = tuple(range(stage, stage + self.mesh.stage_devices))
        along = [self.mesh.ranks_along(axis, rank) for axis in ("tp", "dp")]
        return list(dict.fromkeys([(rank,), *along, whole]))

    def _together(self, record: Record, ranks: tuple[int, ...]) -> Iterator[list[np.ndarray]]:
        """Values of the same call on these ranks, and of all calls."""
        shape = record.value.shape
        path, op = record.node.path, record.node.op
        index = self.nodes[record.rank, path, op, shape].index(record.node.name)
        turn = self.calls[record.rank, record.node.name, shape].index(record)
        names = [self.nodes.get((rank, path, op, shape), []) for rank in ranks]
        if any(index >= len(found) for found in names):
            return
        calls = [self.calls[rank, found[index], shape] for rank, found in zip(ranks, names, strict=True)]
        if len(ranks) > 1 and all(turn < len(found) for found in calls):
            yield [found[turn].value for found in calls]
        if any(len(found) > 1 for found in calls):
            yield [call.value for found in calls for call in found]


def _explained(record: Record, known: _Reference, groups: _Groups, graph: CompiledGraph) -> Difference:
    """The difference, and the operand that fits only together with those of other ranks."""
    for operand in record.operands:
        if operand is None or record.node.op in COLLECTIVES:
            continue
        origin = operand.origin
        if origin.place not in known.values or known.has(origin.place, origin.value):
            continue
        for value, ranks in groups.readings(origin):
            if len(ranks) > 1 and known.has(origin.place, value):
                return Difference(record, graph, operand, ranks)
    return Difference(record, graph)


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


def _where(record: Record) -> str:
    return f"{record.node.op} at {record.node.scope}"


def _source(graph: CompiledGraph, node: Node) -> list[str]:
    """The innermost line that made an operator; a gradient has that of its forward operator, where it is known."""
    lines = graph.sources.get(node.scope, ())
    return [str(lines[-1])] if lines else []


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value
