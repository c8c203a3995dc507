"""Finds the first operator of a cluster whose value is not a part of what a single device computes there.

Operators are matched by the path of their cell, their kind and their direction; values by content, so no layout has to be
known: the value on a rank must be an aligned block of the single device's value. Where an operator yields a part of a sum,
the sum over ranks that share it (or over micro batches) must be one.

Only what a wrong result was computed from is looked at: from there backward through all ranks, up to values that are right. So an
operator of the compiler's own whose value has no counterpart on a single device, such as a look-up in rows that another rank
has, is not suspected where what follows from it is right.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np

from mindllm.compiled.execute.blocks import Rows, allowed_error, is_block, places
from mindllm.compiled.execute.records import MOVES, Place, Record, Sources
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph, Node
from mindllm.parallel.layout import Mesh

LOCAL = frozenset(
    {"AddN", "OneHot", "Equal", "FloorDiv", "Assign", "AssignAdd", "AssignSub", "ZerosLikeExt", "ZerosLike", "IsFinite"}
    | {"AlltoAll", "CumSum"}
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
        "InnerMoeTokenUnpermute",  # of the experts of one rank
        "FlashAttentionScoreGrad",  # of keys, from the queries of one rank of a sequence
    }
    | {"Add", *COLLECTIVES}
)
"""Operators that may yield a part of a sum (or of a maximum), or pass one on."""
OF_THE_LOSS = ("CausalLM.Grad_", "network.Grad_", "cross_entropy", "losses")
REDUCES = frozenset({"AllReduce", "ReduceScatter"})
REORDER = frozenset({"AllGather", "ReduceScatter"})
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "RealDiv", "Div"})
GATHER, SCATTER = "AllGather", "ReduceScatter"
CUTS, JOINS = frozenset({"Split", "SplitTensor"}), frozenset({"Concat"})
UPDATE = "update"
Kind = tuple[str, str, tuple[int, ...], int, tuple[bool, ...]]
"""What operators that do the same have in common: path, name, shape, which of an operator's values it is, flags."""
CHECKED_OF_THE_NORM = frozenset(
    {"Square", "Sqrt"}
)  # of a gradient, and of all; sums are divided by the number of copies


class Verdict(Enum):
    """What a value is to those of a single device: a part of one, its rows in another order, none, or nothing to compare with."""

    RIGHT = "right"
    MOVED = "moved"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Difference:
    """The first operator that differs, and the operand of it that is a part of a sum nobody completed.

    ``suspect`` is the operand that is not what a single device has in its place; None where all are. ``moved`` is the exchange
    since which rows stand elsewhere than they should.
    """

    record: Record
    graph: CompiledGraph
    unfinished: Record | None = None
    over: tuple[int, ...] = ()
    suspect: Record | None = None
    moved: Record | None = None

    def describe(self) -> str:
        """Operator, rank, scope, strategy, source line, and what is wrong with its operand, if that is known."""
        node = self.record.node
        of = f" of {self.record.parameter}" if self.record.parameter else ""
        words = [f"{node.op}{of} on rank {self.record.rank} at {node.scope}", *self._made(self.record)]
        if self.unfinished is not None:
            words += self._operand("its operand is from", self.unfinished.origin)
            words.append(f"that operand was not added over ranks {', '.join(map(str, self.over))}")
        else:
            first = next(iter(self.record.operands), None)
            for operand in filter(None, (self.suspect or first,)):
                words += self._operand("its operand is from", operand)
                if operand.origin is not operand:
                    words += self._operand("which has it from", operand.origin)
        if self.moved is self.record:
            words.append("it yields the right rows in another order, or those of another rank")
        elif self.moved is not None:
            words += self._operand(
                "it has the right rows in another order, or those of another rank, since", self.moved
            )
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
    _rows: dict[Place, list[Rows]] = field(default_factory=dict)
    _allowed: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record], tolerance: float) -> _Reference:
        by_place: dict[Place, list[Record]] = defaultdict(list)
        for record in records:
            by_place[record.place].append(record)
        return cls(tolerance, by_place)

    @cached_property
    def _of_cells(self) -> Mapping[tuple[bool, str], list[Record]]:
        cells: dict[tuple[bool, str], list[Record]] = defaultdict(list)
        for (backward, path, _), records in self.records.items():
            cells[backward, path] += records
        return cells

    def allowed(self, whole: Record) -> float:
        """The largest absolute error of a part of a value that is rounding."""
        if id(whole) not in self._allowed:
            self._allowed[id(whole)] = allowed_error(whole.value, self.tolerance)
        return self._allowed[id(whole)]

    def has(self, place: Place, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of one of the values at ``place``."""
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in self.records.get(place, ()))

    def has_rows(self, place: Place, value: np.ndarray) -> bool:
        """Whether its rows are among those of one of the values at ``place``."""
        if place not in self._rows:
            self._rows[place] = [Rows(whole.value, self.tolerance) for whole in self.records.get(place, ())]
        return any(rows.have(value) for rows in self._rows[place])

    def in_cell(self, place: Place, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of any value of the cell; in the backward pass, of any there is."""
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in self._of_cells.get(place[:2], ()))

    def has_operand(self, place: Place, index: int, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of operand ``index`` of one of the operators at ``place``."""
        operands = [record.operands[index] for record in self.records.get(place, ()) if index < len(record.operands)]
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in operands if whole is not None)


class Comparer:
    """A cluster's ``records`` beside those of a single device.

    ``tolerance`` is relative to the largest magnitude of a single device's value. ``averaged``: every rank computes the mean over
    rows of its own, so that a value is right as well where its mean over ranks is that of a single device.
    """

    def __init__(
        self,
        records: Sequence[Record],
        reference: Iterable[Record],
        graphs: Sequence[CompiledGraph],
        mesh: Mesh,
        tolerance: float,
        averaged: bool = False,
    ) -> None:
        self.records = records
        self.sources = Sources(records)
        self._known = _Reference.of(reference, tolerance)
        self._groups = _Groups(records, graphs, mesh, averaged)
        self._graphs = {graph.rank: graph for graph in graphs}
        self._stacked = {graph.rank: set(_stacked(graph)) for graph in graphs}
        self._verdicts: dict[int, Verdict] = {}
        self._over: dict[int, tuple[int, ...]] = {}

    def verdict(self, record: Record) -> Verdict:
        """What a value is to those of a single device."""
        if id(record) not in self._verdicts:
            self._verdicts[id(record)] = self._judge(record)
        return self._verdicts[id(record)]

    def _judge(self, record: Record) -> Verdict:
        place = record.origin.place if record.node.op in MOVES | COLLECTIVES else record.place
        for value, ranks in self._groups.readings(record):
            if self._known.has(place, value):
                self._over[id(record)] = ranks
                return Verdict.RIGHT
        checked = self._is_checked(record) and place in self._known.records
        for value, ranks in () if checked else self._groups.sums(record):
            if self._known.in_cell(place, value):
                self._over[id(record)] = ranks
                return Verdict.RIGHT
        if not checked:
            return Verdict.UNKNOWN
        moved = any(self._known.has_rows(place, value) for value, _ in self._groups.readings(record))
        return Verdict.MOVED if moved else Verdict.WRONG

    def _is_checked(self, record: Record) -> bool:
        return _is_checked(record) and record.node.name not in self._stacked.get(record.rank, ())

    def suspects(self, results: Iterable[Record]) -> list[Record]:
        """What wrong ``results`` were computed from and is not right, in the order it was computed in."""
        found: dict[int, Record] = {}
        left = list(results)
        while left:
            record = left.pop()
            if id(record) in found or self.verdict(record) is Verdict.RIGHT:
                continue
            found |= {id(each): each for each in self.sources.together(record)}
            left += self.sources.of(record)
        order = {id(record): place for place, record in enumerate(self.records)}
        return sorted(found.values(), key=lambda record: order[id(record)])

    def first_difference(self, results: Iterable[Record]) -> Difference | None:
        """The first operator that ``results`` were computed from and that fits nothing a single device computes, or the exchange
        before it that yields the right rows in another order.
        """
        for record in self.suspects(results):
            if self.verdict(record) is Verdict.WRONG:
                return self.explained(record)
            if self._reorders(record):
                return Difference(record, self._graphs[record.rank], moved=self._since(record))
        return None

    def _reorders(self, record: Record) -> bool:
        """Whether rows are right in what an exchange was given, and stand elsewhere in what it yields."""
        return (
            record.node.op in REORDER
            and self._is_checked(record)
            and self.verdict(record) is Verdict.MOVED
            and self._has_right_sources(record)
        )

    def _has_right_sources(self, record: Record) -> bool:
        sources = list(self.sources.of(record))
        return bool(sources) and all(self.verdict(source) is Verdict.RIGHT for source in sources)

    def _since(self, record: Record) -> Record:
        """The exchange that put rows elsewhere: this one, or the one behind, where its ranks are given parts in another order."""
        given = [(each.rank, each.operands[0]) for each in self.sources.together(record) if each.operands]
        parts = [self._parts(operand) for _, operand in sorted(given, key=lambda item: item[0]) if operand is not None]
        if all(parts) and parts == sorted(parts):
            return record
        behind = next(filter(None, record.operands), None)
        return (behind and self._exchange_behind(behind)) or record

    def _parts(self, record: Record) -> list[tuple[int, ...]]:
        """Which block of a value of its place a record is."""
        place = record.origin.place if record.node.op in MOVES | COLLECTIVES else record.place
        wholes = self._known.records.get(place, ())
        return next(
            filter(None, (sorted(places(record.value, one.value, self._known.allowed(one))) for one in wholes)), []
        )

    def _exchange_behind(self, record: Record) -> Record | None:
        """The nearest exchange a value has come through; where what that was given is in another order, the one before."""
        seen, left = {id(record)}, deque([record])
        while left:
            behind = left.popleft()
            if behind.node.op in COLLECTIVES:
                late = [] if self._has_right_sources(behind) else self.suspects(self.sources.of(behind))
                return next((each for each in late if self._reorders(each)), behind)
            for source in filter(None, behind.operands):
                if id(source) not in seen:
                    seen.add(id(source))
                    left.append(source)
        return None

    def _misplaced(self, record: Record) -> Record | None:
        """Where operands are each a right part, but not parts of the same place: the exchange that one of them came through."""
        first, second = (*record.operands, None, None)[:2]
        if (
            record.node.op not in ELEMENTWISE
            or first is None
            or second is None
            or first.value.shape != second.value.shape
        ):
            return None
        for one in self._known.records.get(record.place, ()):
            if len(one.operands) < 2 or one.operands[0] is None or one.operands[1] is None:
                continue
            found = [
                set(places(mine.value, theirs.value, self._known.allowed(theirs)))
                for mine, theirs in zip((first, second), (one.operands[0], one.operands[1]), strict=True)
            ]
            if all(found) and not found[0] & found[1]:
                near = min((second, first), key=lambda operand: operand.node.op not in COLLECTIVES)
                return self._exchange_behind(near)
        return None

    def explained(self, record: Record) -> Difference:
        """The difference, and what it was computed from that is a part of a sum nobody completed, or not what it should be."""
        graph = self._graphs[record.rank]
        if record.node.op in COLLECTIVES:
            return Difference(record, graph)
        for index in range(len(record.operands)):
            if ranks := self._missing_sum(record, index):
                return Difference(record, graph, record.operands[index], ranks)
        if part := self._unfinished(record):
            return Difference(record, graph, part, self._over[id(part)])
        if moved := self._misplaced(record):
            return Difference(record, graph, moved=moved)
        return Difference(record, graph, suspect=self._suspect(record))

    def _unfinished(self, record: Record) -> Record | None:
        """The nearest value behind it, without a reduction between, that is right only together with those of other ranks."""
        seen, left = {id(record)}, deque(filter(None, record.operands))
        while left:
            behind = left.popleft()
            if id(behind) in seen or behind.node.op in REDUCES:
                continue
            seen.add(id(behind))
            if self.verdict(behind) is not Verdict.RIGHT:
                left.extend(filter(None, behind.operands))
            elif len(self._over[id(behind)]) > 1 and not _is_of_the_loss(behind.node):
                return behind
        return None

    def _suspect(self, record: Record) -> Record | None:
        """The first operand that is not what a single device has in its place."""
        for index, operand in enumerate(record.operands):
            if operand is not None and not self._known.has_operand(record.place, index, operand.value):
                return operand
        return None

    def _missing_sum(self, record: Record, index: int) -> tuple[int, ...]:
        """Ranks whose sum of this operand is what the operator has for one on a single device; none if it needs no sum."""
        operand = record.operands[index]
        if operand is None or self._known.has_operand(record.place, index, operand.value):
            return ()
        sums = self._groups.operand_sums(record, index)
        return next((ranks for value, ranks in sums if self._known.has_operand(record.place, index, value)), ())


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


class _Groups:
    """Values of the same operator on other ranks and in other micro batches, which are other calls of it or other operators.

    Ranks of a stage have the same operators, so of several ones at a place the first is that of another rank's first.
    """

    def __init__(
        self, records: Iterable[Record], graphs: Sequence[CompiledGraph], mesh: Mesh, averaged: bool = False
    ) -> None:
        self.mesh, self.averaged = mesh, averaged
        self.constants = {graph.rank: graph.constants for graph in graphs}
        self.exchanging = {graph.rank: _exchanging(graph) for graph in graphs}
        self.calls: dict[tuple[int, str, int], list[Record]] = defaultdict(list)
        self.nodes: dict[tuple[int, Kind], dict[int | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            self.calls[record.rank, record.node.name, record.number].append(record)
            names = self.nodes[record.rank, self._kind(record)][record.node.micro_batch]
            if record.node.name not in names:
                names.append(record.node.name)

    def readings(self, record: Record) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """The value itself; where it may be a part, what it is together with those of other ranks and micro batches."""
        if self.averaged or _may_be_a_part(record):
            yield from self.sums(record)
        else:
            yield record.value, ()

    def sums(self, record: Record) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """The value itself, and what it is together with those of other ranks and micro batches."""
        yield record.value, ()
        if record.value.dtype == bool:
            return
        for ranks, records in self._together(record):
            values = [other.value for other in records]
            if self.averaged:
                yield np.mean(values, axis=0), ranks
            else:
                yield (np.maximum.reduce(values) if record.node.op == "ReduceMax" else np.sum(values, axis=0)), ranks
        if _is_of_the_loss(record.node):
            yield from ((record.value * len(ranks), ranks) for ranks in self._ranks(record.rank) if len(ranks) > 1)

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
        return list(dict.fromkeys([(rank,), *along, *self.exchanging.get(rank, ()), whole]))

    def _together(self, record: Record) -> Iterator[tuple[tuple[int, ...], list[Record]]]:
        """Ranks that may share the value: records of the same call on these ranks, of all calls, and of all such operators."""
        kind, part = self._kind(record), record.node.micro_batch
        index = self.nodes[record.rank, kind][part].index(record.node.name)
        turn = self.calls[record.rank, record.node.name, record.number].index(record)
        for ranks in self._ranks(record.rank):
            parts = [self.nodes.get((rank, kind), {}) for rank in ranks]
            if any(index >= len(found.get(part, ())) for found in parts):
                continue
            calls = [self._calls(rank, found[part][index], record) for rank, found in zip(ranks, parts, strict=True)]
            if len(ranks) > 1 and all(turn < len(found) for found in calls):
                yield ranks, [found[turn] for found in calls]
            for which in (slice(index, index + 1), slice(None)):
                every = [
                    call
                    for rank, found in zip(ranks, parts, strict=True)
                    for names in found.values()
                    for name in names[which]
                    for call in self._calls(rank, name, record)
                ]
                if len(every) > len(ranks):
                    yield ranks, every

    def _kind(self, record: Record) -> Kind:
        """With its flags: products for the gradients of a weight and of what it is multiplied with differ in them alone."""
        node, constants = record.node, self.constants.get(record.rank, {})
        flags = tuple(constants[name] for name in node.inputs if isinstance(constants.get(name), bool))
        return node.path, node.op, record.value.shape, record.number, flags

    def _calls(self, rank: int, name: str, record: Record) -> list[Record]:
        return self.calls[rank, name, record.number]


def _exchanging(graph: CompiledGraph) -> list[tuple[int, ...]]:
    """The groups of ranks that a rank exchanges with."""
    return list(dict.fromkeys(ranks for ranks in graph.groups.values() if graph.rank in ranks))


def _is_checked(record: Record) -> bool:
    _, path, op = record.place
    if path == "" or op in MOVES | LOCAL or record.origin.node.op in LOCAL:
        return False
    if (
        record.node.backward and not record.value.ndim
    ):  # of the loss, whose gradient begins at as many places as it has copies
        return False
    if path.startswith(f"{UPDATE}.") and ".optimizer" not in path and op not in CHECKED_OF_THE_NORM:
        return False
    return np.issubdtype(record.value.dtype, np.floating)


def _may_be_a_part(record: Record) -> bool:
    """Whether the operator may yield a part of a sum. The gradient of the loss begins divided by the number of its copies."""
    return record.node.op in PARTIAL or _is_of_the_loss(record.node)


def _is_of_the_loss(node: Node) -> bool:
    return node.backward and any(part in node.path for part in OF_THE_LOSS)
