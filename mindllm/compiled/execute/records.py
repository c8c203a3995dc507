"""Every value that every operator of a cluster yields, and where in the model it stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.execute.rank_interpreter import Parameter
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, Node

Place = tuple[bool, str, str]
"""Where an operator stands, whatever surrounds the model: backward or not, path of the cell, kind of operator."""

MOVES = frozenset(
    {"Reshape", "Transpose", "Cast", "StridedSlice", "Split", "SplitWithSize", "Concat", "ExpandDims", "Tile"}
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
