"""Which ranks and micro-batches may share a value: each a part of a sum, or of the gradient of the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mindllm.compiled.execute.records import Record
from mindllm.compiled.graph.compiled_graph import BACKWARD, COLLECTIVES, CompiledGraph, Node
from mindllm.compiled.graph.operators import Operators
from mindllm.parallel.layout import Mesh

PARTIAL = frozenset(
    {
        "MatMul",
        "BatchMatMul",
        "GroupedMatmul",
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
COMPLETE = frozenset({"AllReduce", "AllGather", "ReduceScatter", "Broadcast"})
Kind = tuple[str, str, tuple[int, ...], int, tuple[bool, ...]]
"""What operators that do the same have in common: path, name, shape, which of an operator's values it is, flags."""


class Sharing:
    """Values of the same operator on other ranks and in other micro batches, which are other calls of it or other operators.

    Ranks of a stage have the same operators, so of several ones at a place the first is that of another rank's first.
    """

    def __init__(
        self, records: Iterable[Record], graphs: Sequence[CompiledGraph], mesh: Mesh, averaged: bool = False
    ) -> None:
        self.mesh, self.averaged = mesh, averaged
        self.constants = {graph.rank: graph.constants for graph in graphs}
        self.exchanging = {graph.rank: _exchanging(graph) for graph in graphs}
        self.operators = {graph.rank: Operators(graph) for graph in graphs}
        self._cells: dict[tuple[int, str], str] = {}
        self.calls: dict[tuple[int, str, int], list[Record]] = defaultdict(list)
        self.nodes: dict[tuple[int, Kind], dict[int | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            self.calls[record.rank, record.node.name, record.number].append(record)
            names = self.nodes[record.rank, self._kind(record)][record.node.micro_batch]
            if record.node.name not in names:
                names.append(record.node.name)

    def readings(self, record: Record) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """Yield the value; if it may be a part, also its combinations with other ranks and micro-batches."""
        if self.averaged or self._may_be_a_part(record):
            yield from self.sums(record)
        else:
            yield record.value, ()

    def sums(self, record: Record) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """Yield the value and its combinations with other ranks and micro-batches."""
        yield record.value, ()
        if record.value.dtype == bool:
            return
        for ranks, records in self._together(record):
            values = [other.value for other in records]
            if self.averaged:
                yield np.mean(values, axis=0), ranks
            else:
                yield (np.maximum.reduce(values) if record.node.op == "ReduceMax" else np.sum(values, axis=0)), ranks
        if self.of_the_loss(record):
            yield from ((record.value * len(ranks), ranks) for ranks in self._ranks(record.rank) if len(ranks) > 1)

    def operand_sums(self, record: Record, index: int) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """Sums of operand ``index`` over ranks that execute the same operator."""
        for ranks, records in self._together(record):
            operands = [other.operands[index] for other in records if index < len(other.operands)]
            values = [operand.value for operand in operands if operand is not None]
            if len(ranks) > 1 and len(values) == len(records) and len({value.shape for value in values}) == 1:
                yield np.sum(values, axis=0), ranks

    def others(self, record: Record) -> Iterator[Record]:
        """Yield the records of the same operator on ranks that may share a sum with it."""
        if self.averaged or self._may_be_a_part(record):
            for _, together in self._together(record):
                yield from together

    def _shares(self, node: Node, ranks: tuple[int, ...]) -> bool:
        """Return True if partial sums may be on these ranks. After an exchange its ranks have one value, or parts of it."""
        return node.op not in COMPLETE or len(set(ranks) & set(node.ranks)) < 2

    def is_equal_elsewhere(self, record: Record, ranks: Iterable[int] = ()) -> bool:
        """Return True if the operator yields the same value on another one of ``ranks`` (empty: any rank it exchanges with)."""
        turn = self.calls[record.rank, record.node.name, record.number].index(record)
        among = set(ranks) or {other for group in self.several(record.rank) for other in group}
        for rank in among - {record.rank}:
            names = [name for found in self.nodes.get((rank, self._kind(record)), {}).values() for name in found]
            calls = [self._calls(rank, name, record)[turn:] for name in names]
            same = (call[0] for call in calls if call and call[0].node.scope == record.node.scope)
            if any(np.array_equal(other.value, record.value) for other in same):
                return True
        return False

    def several(self, rank: int) -> Iterator[tuple[int, ...]]:
        """Groups of more than one rank that may share what a rank computes."""
        yield from (ranks for ranks in self._ranks(rank) if len(ranks) > 1)

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
            if not self._shares(record.node, ranks):
                continue
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
        return self._cell(record), node.op, record.value.shape, record.number, flags

    def _cell(self, record: Record) -> str:
        """Return the cell of an operator; for a gradient, whose path may be wrong, that of its forward operator."""
        key, node = (record.rank, record.node.name), record.node
        if key not in self._cells:
            forward = self.operators[record.rank].forward(node) if node.backward else None
            self._cells[key] = f"{BACKWARD}{self.operators[record.rank].place(forward)}" if forward else node.path
        return self._cells[key]

    def _may_be_a_part(self, record: Record) -> bool:
        """Return True if the operator may yield a partial sum. The gradient of the loss starts divided by its copies."""
        return record.node.op in PARTIAL or self.of_the_loss(record)

    def of_the_loss(self, record: Record) -> bool:
        """Return True if it is in the backward pass of the loss."""
        cell = self._cell(record)
        if not cell.startswith(BACKWARD):
            return _is_of_the_loss(record.node)
        place = cell.removeprefix(BACKWARD)
        return not place or place.startswith(OF_THE_LOSS[2:])

    def _calls(self, rank: int, name: str, record: Record) -> list[Record]:
        return self.calls[rank, name, record.number]


def _exchanging(graph: CompiledGraph) -> list[tuple[int, ...]]:
    """Return the groups of ranks with which a rank exchanges."""
    return list(dict.fromkeys(ranks for ranks in graph.groups.values() if graph.rank in ranks))


def _is_of_the_loss(node: Node) -> bool:
    return node.backward and any(part in node.path for part in OF_THE_LOSS)
