"""Finds the first operator of a cluster whose value is not a part of what a single device computes there.

Operators are matched by the path of their cell, their kind and their direction; values by content, so no layout has to be
known: the value on a rank must be an aligned block of the single device's value. Where an operator yields a part of a sum,
the sum over ranks that share it (or over micro batches) must be one.

Only what a wrong result was computed from is looked at: from there backward through all ranks, up to values that are right. So an
operator of the compiler's own whose value has no counterpart on a single device, such as a look-up in rows that another rank
has, is not suspected where what follows from it is right.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from mindllm.compiled.execute.device_values import DeviceValues, places
from mindllm.compiled.execute.records import MOVES, Record, Sources
from mindllm.compiled.execute.sharing import Sharing
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph
from mindllm.compiled.graph.operators import Operators
from mindllm.parallel.layout import Mesh


@dataclass(frozen=True)
class Difference:
    """The first operator that differs, and the operand of it that is a part of a sum nobody completed.

    ``suspect`` is the operand that is not what a single device has in its place; None where all are. ``moved`` is the exchange
    since which rows stand elsewhere than they should. ``since``: where the suspect was made of what nothing can be said of.
    ``loss``: what is wrong with the gradient of the loss, and the operators it begins with.
    """

    record: Record
    graph: CompiledGraph
    unfinished: Record | None = None
    over: tuple[int, ...] = ()
    suspect: Record | None = None
    moved: Record | None = None
    since: Record | None = None
    loss: tuple[str, tuple[Record, ...]] | None = None

    @cached_property
    def _operators(self) -> Operators:
        return Operators(self.graph)

    def describe(self) -> str:
        """Operator, rank, scope, strategy, source line, and what is wrong with its operand, if that is known."""
        node = self.record.node
        of = f" of {self.record.parameter}" if self.record.parameter else ""
        words = [f"{node.op}{of} on rank {self.record.rank} at {node.scope}", *self._made(self.record)]
        if self.unfinished is not None:
            words += self._operand("its operand is from", self.unfinished.origin)
            words.append(f"that operand was not added over ranks {listed(self.over)}")
        elif self.loss is not None:
            words.append(self.loss[0])
            for record in self.loss[1]:
                words += self._operand("that gradient begins with", record)
        else:
            first = next(iter(self.record.operands), None)
            for operand in filter(None, (self.suspect or first,)):
                words += self._operand("its operand is from", operand)
                if operand.origin is not operand:
                    words += self._operand("which has it from", operand.origin)
            if self.since not in (None, self.suspect) and self.since is not None:
                words += self._operand("what nothing can be said of begins with", self.since)
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
        """Yield the forward operator of a gradient, its strategy and its source line, as far as they are known.

        MindSpore gives a gradient the scope of any operator of its kind, so the forward operator alone says whose it is.
        """
        if record.node.backward and (forward := self._operators.forward(record.node)):
            yield f"in the backward pass of {forward.op} at {self._operators.place(forward) or forward.scope}"
        if record.node.input_strategy:
            yield f"strategy {record.node.input_strategy}"
        if lines := self.graph.source(record.node):
            yield f"source {lines[-1]}: {lines[-1].text}"


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words."""
    return ", ".join(map(str, ranks))


LOCAL = frozenset(
    {"AddN", "OneHot", "Equal", "FloorDiv", "Assign", "AssignAdd", "AssignSub", "ZerosLikeExt", "ZerosLike", "IsFinite"}
    | {"AlltoAll", "CumSum"}
)
"""Operators whose value on a rank need not be a part of a whole, or that the compiler adds where it likes."""
REDUCES = frozenset({"AllReduce", "ReduceScatter"})
REORDER = frozenset({"AllGather", "ReduceScatter"})
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "RealDiv", "Div"})
SLICE, OF_RANKS = "StridedSlice", "redistribution"
GATHER, SCATTER = "AllGather", "ReduceScatter"
CUTS, JOINS = frozenset({"Split", "SplitTensor"}), frozenset({"Concat"})
UPDATE = "update"
CHECKED_OF_THE_NORM = frozenset(
    {"Square", "Sqrt"}
)  # of a gradient, and of all; sums are divided by the number of copies


class Verdict(Enum):
    """What a value is to those of a single device: a part of one, its rows in another order, none, or nothing to compare with."""

    RIGHT = "right"
    MOVED = "moved"
    WRONG = "wrong"
    UNKNOWN = "unknown"


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
        self._known = DeviceValues.of(reference, tolerance)
        self._sharing = Sharing(records, graphs, mesh, averaged)
        self._graphs = {graph.rank: graph for graph in graphs}
        self._stacked = {graph.rank: set(_stacked(graph)) for graph in graphs}
        self._verdicts: dict[int, Verdict] = {}
        self._over: dict[int, tuple[int, ...]] = {}

    def verdict(self, record: Record) -> Verdict:
        """Compare a value with those of a single device."""
        if id(record) not in self._verdicts:
            self._verdicts[id(record)] = self._judge(record)
        return self._verdicts[id(record)]

    def _judge(self, record: Record) -> Verdict:
        place = record.origin.place if record.node.op in MOVES | COLLECTIVES else record.place
        for value, ranks in self._sharing.readings(record):
            if self._known.has(place, value):
                self._over[id(record)] = ranks
                return Verdict.RIGHT
        if self._moves_wrong(record):
            return Verdict.UNKNOWN
        checked = self._is_checked(record) and place in self._known.records
        for value, ranks in () if checked else self._sharing.sums(record):
            if self._known.in_cell(place, value):
                self._over[id(record)] = ranks
                return Verdict.RIGHT
        if not checked:
            return Verdict.UNKNOWN
        moved = any(self._known.has_rows(place, value) for value, _ in self._sharing.readings(record))
        return Verdict.MOVED if moved else Verdict.WRONG

    def _moves_wrong(self, record: Record) -> bool:
        """Return True if it passes on a wrong value. No sum over ranks makes that right."""
        source = next(iter(record.operands), None) if record.node.op in MOVES else None
        return source is not None and self.verdict(source) is Verdict.WRONG

    def _is_checked(self, record: Record) -> bool:
        return _is_checked(record) and record.node.name not in self._stacked.get(record.rank, ())

    def suspects(self, results: Iterable[Record]) -> list[Record]:
        """Return everything not right that wrong ``results`` were computed from, in order of computation."""
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
        """Return the first operator behind wrong ``results`` that does not fit the single device, or an exchange that reorders
        rows.
        """
        late = None
        for record in self.suspects(results):
            if self.verdict(record) is Verdict.WRONG:
                if self._begins(record):
                    return self.explained(self._given_wrong(record))
                late = late or record
            if self._reorders(record):
                return Difference(
                    record,
                    self._graphs[record.rank],
                    moved=self._equal_cut(record, record.node.ranks) or self._since(record),
                )
        return self.explained(late) if late else None

    def _given_wrong(self, record: Record) -> Record:
        """Return the record, or the one of another rank or micro-batch that has wrong operands."""
        several = [record, *self._sharing.others(record)]
        return next((each for each in several if self._wrong_operand(each)), record)

    def _wrong_operand(self, record: Record) -> bool:
        return any(self.verdict(operand) is not Verdict.RIGHT for operand in self._unlike(record))

    def _begins(self, record: Record) -> bool:
        """Return True if nothing wrong precedes it, nor what other ranks add to it, which may be computed later."""
        seen: set[int] = set()
        left = [source for each in (record, *self._sharing.others(record)) for source in self.sources.of(each)]
        while left:
            source = left.pop()
            if id(source) in seen or self.verdict(source) is Verdict.RIGHT:
                continue
            if self.verdict(source) is Verdict.WRONG:
                return False
            seen.add(id(source))
            left += self.sources.of(source)
        return True

    def _reorders(self, record: Record) -> bool:
        """Return True if an exchange has the right rows as input, and in another place as output."""
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
        """Return the exchange that moved rows: this one, or an earlier one if its ranks have parts in another order."""
        given = [(each.rank, each.operands[0]) for each in self.sources.together(record) if each.operands]
        parts = [self._parts(operand) for _, operand in sorted(given, key=lambda item: item[0]) if operand is not None]
        if all(parts) and parts == sorted(parts):
            return record
        behind = next(filter(None, record.operands), None)
        return (behind and self._exchange_behind(behind)) or record

    def _parts(self, record: Record) -> list[tuple[int, ...]]:
        """Return which blocks of a value at its place a record may be."""
        place = record.origin.place if record.node.op in MOVES | COLLECTIVES else record.place
        wholes = self._known.records.get(place, ())
        return next(
            filter(None, (sorted(places(record.value, one.value, self._known.allowed(one))) for one in wholes)), []
        )

    def _exchange_behind(self, record: Record) -> Record | None:
        """Return the nearest exchange before a value; if its input is in another order, the one that reordered it."""
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
        """Return the exchange before an operand, if operands are right parts of different places."""
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
                return self._equal_cut(record) or self._exchange_behind(near)
        return None

    def _equal_cut(self, record: Record, ranks: Sequence[int] = ()) -> Record | None:
        """Return the first earlier operator that cuts the part of another rank, of ``ranks``, instead of its own."""
        seen, left, found = {id(record)}, [record], []
        while left:
            for source in filter(None, left.pop().operands):
                if id(source) not in seen:
                    seen.add(id(source))
                    left.append(source)
                    if source.node.op == SLICE and source.node.instance.startswith(OF_RANKS):
                        found.append(source)
        return next((cut for cut in reversed(found) if self._sharing.is_equal_elsewhere(cut, ranks)), None)

    def explained(self, record: Record) -> Difference:
        """Return the difference with its cause: a partial sum that was not completed, or a wrong operand."""
        graph = self._graphs[record.rank]
        if of_loss := self._of_loss(record):
            return Difference(record, graph, loss=of_loss)
        if record.node.op in COLLECTIVES:
            return Difference(record, graph)
        for index in range(len(record.operands)):
            if ranks := self._missing_sum(record, index):
                part = record.operands[index]
                return Difference(record, graph, part and self._first_part(part), ranks)
        if part := self._unfinished(record):
            return Difference(record, graph, part, self._over[id(part)])
        if moved := self._misplaced(record):
            return Difference(record, graph, moved=moved)
        suspect = self._suspect(record) or self._unknown_operand(record)
        unknown = suspect is not None and self.verdict(suspect) is Verdict.UNKNOWN
        return Difference(
            record, graph, suspect=suspect, since=self._unknown_since(suspect) if unknown and suspect else None
        )

    def _of_loss(self, record: Record) -> tuple[str, tuple[Record, ...]] | None:
        """Return what is wrong with the gradient of the loss, which starts divided by its copies, and where it starts."""
        if times := self._undivided_factor(record):
            told = f"it is {times} times too large: the gradient of the loss is not divided by the number of its copies"
        elif not record.node.backward:
            return None
        elif over := self._divided_loss(record):
            told = f"what it is given is the gradient of the loss divided over ranks {listed(over)}, and never added"
        elif self._sharing.of_the_loss(record) and (times := self._times_too_large(record)):
            told = f"it is {times} times too large: the gradient of the loss is not divided by the number of its copies"
        else:
            return None
        return told, self._begin_of_loss(record.rank)

    def _divided_loss(self, record: Record) -> tuple[int, ...]:
        """Return the ranks over which an operand is the divided gradient of the loss, for an operator outside of the loss."""
        for operand in () if self._sharing.of_the_loss(record) else filter(None, record.operands):
            right = self.verdict(operand) is Verdict.RIGHT and self._sharing.of_the_loss(operand)
            if right and len(over := self._over[id(operand)]) > 1:
                return over
        return ()

    def _undivided_factor(self, record: Record) -> int:
        """Return the number by which the written-out cross entropy multiplies a gradient of the loss that is not divided, or 0.

        Its operators have the scope of the forward pass, and a single device multiplies by nothing there.
        """
        if record.node.op != "Mul" or record.node.backward or "cross_entropy" not in record.node.path:
            return 0
        for operand in filter(None, record.operands):
            is_gradient = self._sharing.of_the_loss(operand) and operand.value.shape == record.value.shape
            if is_gradient and self.verdict(operand) is Verdict.RIGHT and len(self._over[id(operand)]) < 2:
                nonzero = operand.value != 0
                return round(float(np.mean(record.value[nonzero] / operand.value[nonzero]))) if nonzero.any() else 0
        return 0

    def _times_too_large(self, record: Record) -> int:
        """Return the number of ranks that a value must be divided by to be right; 0 if there is none."""
        place = record.origin.place if record.node.op in MOVES | COLLECTIVES else record.place
        sizes = sorted({len(ranks) for ranks in self._sharing.several(record.rank)})
        return next((size for size in sizes if self._known.has(place, record.value / size)), 0)

    def _begin_of_loss(self, rank: int) -> tuple[Record, ...]:
        """Return a rank's first operator of the backward pass, and the first gradient of an operator of the model."""
        backward = [record for record in self.records if record.rank == rank and record.node.backward]
        of_model = (record for record in backward if self._sharing.operators[rank].forward(record.node))
        return tuple(dict.fromkeys([*backward[:1], *itertools.islice(of_model, 1)]))

    def _unfinished(self, record: Record) -> Record | None:
        """Return the nearest earlier value, without a reduction in between, that is right only together with other ranks."""
        seen, left = {id(record)}, deque(filter(None, record.operands))
        while left:
            behind = left.popleft()
            if id(behind) in seen or behind.node.op in REDUCES:
                continue
            seen.add(id(behind))
            if self.verdict(behind) is not Verdict.RIGHT:
                left.extend(filter(None, behind.operands))
            elif len(self._over[id(behind)]) > 1 and not self._sharing.of_the_loss(behind):
                return self._first_part(behind)
        return None

    def _first_part(self, record: Record) -> Record:
        """Return the operator that yields a partial sum which others pass on."""
        over = self._over[id(record)] if self.verdict(record) is Verdict.RIGHT else None
        for source in filter(None, record.operands):
            if self.verdict(source) is Verdict.RIGHT and self._over[id(source)] == over:
                return self._first_part(source)
        return record

    def _suspect(self, record: Record) -> Record | None:
        """Return the first operand that differs from the single device's, preferably one that is right nowhere."""
        unlike = list(self._unlike(record))
        return next(
            (operand for operand in unlike if self.verdict(operand) is not Verdict.RIGHT), next(iter(unlike), None)
        )

    def _unknown_operand(self, record: Record) -> Record | None:
        """Return the first operand not known to be right, if a single device does not compute it, as gathered weights."""
        known = (operand for operand in record.operands if operand is not None)
        return next((operand for operand in known if self.verdict(operand) is not Verdict.RIGHT), None)

    def _unlike(self, record: Record) -> Iterator[Record]:
        """Yield operands that differ from those of a single device."""
        for index, operand in enumerate(record.operands):
            if operand is None or not self._known.knows_operand(record.place, index):
                continue
            if not self._known.has_operand(record.place, index, operand.value):
                yield operand

    def _unknown_since(self, record: Record) -> Record:
        """Return where an uncheckable value was computed first: from token counts, or by operators that a single device lacks."""
        for source in filter(None, record.operands):
            if self.verdict(source) is Verdict.UNKNOWN:
                return self._unknown_since(source)
        return record

    def _missing_sum(self, record: Record, index: int) -> tuple[int, ...]:
        """Ranks whose sum of this operand is what the operator has for one on a single device; none if it needs no sum."""
        operand = record.operands[index]
        if operand is None or self._known.has_operand(record.place, index, operand.value):
            return ()
        sums = self._sharing.operand_sums(record, index)
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
