"""What lies in the blocks of memory that MindSpore plans as a whole (Somas, ``memory_optimize_level: O1``).

There the tensors of a graph have places in a few blocks that are there as long as the graph runs. The memory tracker tells of the
blocks alone, but MindSpore leaves the plan beside its files: size, place and life of every tensor, and who reads it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOMAS = "SomasMemory"  # the name of its blocks
PLAN = "*_somas_tensor_offset_*.ir"
TENSOR = re.compile(r"%(\d+)T\t#(\d+)S\t#\d+S\t&(\d+)\t\w+\t\w+\t(\d+)\t(\d+)\t(\S+)")
NODE = re.compile(r"\$\d+\t(\S+)\t\d+\tinputs\[([^\]]*)\]")
INPUT = re.compile(r"%(\d+)T")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor with its place. ``size`` and ``offset`` are bytes; it lives from operator ``start`` to ``end`` of the graph, both
    included. ``node`` writes it, ``users`` read it.
    """

    size: int
    offset: int
    start: int
    end: int
    node: str
    users: tuple[str, ...]


def read_plans(directory: Path) -> list[list[PlannedTensor]]:
    """The plan of every graph whose memory is planned, from the files the memory tracker leaves in ``rank_R/``."""
    return [list(_tensors(path)) for path in sorted(directory.glob(PLAN))]


def fullest_moment(plan: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """The tensors that are there when most of the planned memory is in use.

    Of those that share a place, as an operator's that writes into its input, only the largest.
    """
    tensors = list(plan)
    times = sorted({tensor.start for tensor in tensors})
    moments = (_places(tensor for tensor in tensors if tensor.start <= time <= tensor.end) for time in times)
    return max(moments, key=lambda moment: sum(tensor.size for tensor in moment), default=[])


def _places(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    largest: dict[int, PlannedTensor] = {}
    for tensor in tensors:
        if tensor.offset not in largest or largest[tensor.offset].size < tensor.size:
            largest[tensor.offset] = tensor
    return list(largest.values())


def _tensors(path: Path) -> Iterator[PlannedTensor]:
    lines = path.read_text(encoding="utf-8").splitlines()
    users = defaultdict[str, list[str]](list)
    for line in lines:
        if node := NODE.match(line):
            for number in INPUT.findall(node[2]):
                users[number].append(node[1])
    for line in lines:
        if found := TENSOR.match(line):
            number, size, offset, start, end, name = found.groups()
            yield PlannedTensor(int(size), int(offset), int(start), int(end), name, tuple(users[number]))
