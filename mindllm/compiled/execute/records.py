"""Every value that every operator of a cluster yields, where in the model it stands, and what it was computed from.

A value that came over an exchange leads to what all ranks of the group gave.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.execute.assignments import ASSIGNMENTS, CHANGED, Parameter
from mindllm.compiled.execute.exchange import RECEIVE, SEND, Exchange
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, Node

Place = tuple[bool, str, str]
"""Where an operator stands, whatever surrounds the model: backward or not, path of the cell, kind of operator."""

MOVES = frozenset(
    {"Reshape", "Transpose", "Cast", "StridedSlice", "Split", "SplitWithSize", "SplitTensor", "Concat", "ExpandDims"}
    | {"Tile"}
)
"""Operators that compute nothing: their value is that of their first operand."""
WRAPPER = "network"
GRADIENTS = "gradients"


@dataclass(frozen=True, eq=False)
class Record:
    """One value of one operator on one rank.

    Attributes:
        operands: the records that its operands are values of; None for those nobody computed.
        parameter: name of the parameter an assignment changes; "" for other operators.
        number: which value of the operator's it is, of several.
    """

    rank: int
    node: Node
    value: np.ndarray
    operands: tuple[Record | None, ...]
    parameter: str = ""
    number: int = 0

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

    @property
    def assigns(self) -> bool:
        """Whether it changes a parameter."""
        return self.node.op in ASSIGNMENTS


class Recorder:
    """An observer that keeps every array, and which operator every operand came from."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._kept: list[Any] = []  # what has an id in the next one
        self._of_array: dict[tuple[int, int], Record] = {}
        self._of_parameter: dict[tuple[int, str], Record] = {}

    def __call__(self, rank: int, node: Node, operands: tuple[Any, ...], result: Any) -> None:
        given = tuple(_flat(operands))
        known = tuple(self.maker(rank, operand) for operand in given)
        changed = [
            operands[place].name
            for place in CHANGED.get(node.op, (0,))
            if place < len(operands) and isinstance(operands[place], Parameter)
        ]
        for number, value in enumerate(_flat((result,))):
            if isinstance(value, np.ndarray | np.generic):  # numpy's sum of two scalars is no array
                record = Record(rank, node, np.asarray(value), known, "".join(changed[:1]), number)
                self.records.append(record)
                self._of_array[rank, id(value)] = record
                self._kept.append(value)
                if record.assigns:
                    self._of_parameter |= {(rank, name): record for name in changed[number:]}

    def changer(self, rank: int, parameter: str) -> Record | None:
        """Return the record that changed a parameter of a rank last."""
        return self._of_parameter.get((rank, parameter))

    def maker(self, rank: int, value: Any) -> Record | None:
        """Return the record that computed an array, or changed a parameter last, on a rank; None for inputs."""
        if isinstance(value, Parameter):
            return self.changer(rank, value.name)
        return self._of_array.get((rank, id(value)))


def place_of(node: Node) -> Place:
    """Return the place of an operator. On a single device all gradients of a kind have one path, which is left out."""
    levels = itertools.dropwhile(lambda level: level == WRAPPER, node.path.split("."))
    return node.backward, GRADIENTS if node.backward else ".".join(levels), node.op


class Sources:
    """What a record was computed from, on its own rank and, behind an exchange, on those of the group."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._together: dict[int, list[Record]] = {}
        turns: dict[tuple[Any, ...], dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            if record.node.exchanges:
                turns[_meeting(record)][record.rank].append(record)
        for ranks in turns.values():
            for met in itertools.zip_longest(*ranks.values()):
                group = [record for record in met if record is not None]
                self._together |= {id(record): group for record in group}

    def together(self, record: Record) -> Sequence[Record]:
        """Return the records of one exchange on all its ranks; for other operators the record alone."""
        return self._together.get(id(record), [record])

    def of(self, record: Record) -> Iterator[Record]:
        """Yield the records that its value depends on."""
        for each in self.together(record):
            yield from filter(None, each.operands)


def _meeting(record: Record) -> tuple[Any, ...]:
    """Return a key that exchanges of ranks share which meet in turn."""
    node, attributes = record.node, record.node.attributes
    if node.op in (SEND, RECEIVE):
        return Exchange(record.rank, node, None).channel
    return node.op, node.ranks, attributes.get("group"), attributes.get("op")


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value
