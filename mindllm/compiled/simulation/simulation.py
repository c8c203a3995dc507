"""What MindSpore's dry run tells about one rank: its memory block by block, what ran in which order, what was exchanged."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.outside import read_compressed_json
from mindllm.units import MIB

FORMAT = "mindllm simulation 1"
WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer state", "gradients"
ACTIVATIONS, COMMUNICATION, OTHER = "activations", "communication buffers", "other"
CATEGORIES = (WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, COMMUNICATION, OTHER)
BACKWARD = "Gradients/"


@dataclass(frozen=True)
class Block:
    """A piece of device memory. It is alive from ``start`` up to, and without, ``end``; times count events, not seconds.

    ``end`` is ``None`` for what stays: weights, and what the step returns. ``size`` is in bytes, rounded up as the pool does.
    ``node`` is the operator that writes it, or the name of the parameter; ``users`` are times of tasks that read it;
    ``kind`` is MindSpore's word (Weight, ConstantValue, Kernel, …), ``category`` one of :data:`CATEGORIES`.
    """

    start: int
    end: int | None
    address: int
    stream: int
    size: int
    kind: str
    node: str
    users: tuple[int, ...]
    category: str

    def alive(self, time: int) -> bool:
        return self.start <= time and (self.end is None or time < self.end)

    @property
    def operator(self) -> str:
        """Kind of the operator that writes it; empty for parameters."""
        return operator_of(self.node)

    @property
    def path(self) -> str:
        """The cells around the operator, as ``model.layers.0.attention.wq``; for a parameter its name."""
        return path_of(self.node)

    @property
    def backward(self) -> bool:
        return self.node.startswith(BACKWARD)


@dataclass(frozen=True)
class Task:
    """An operator as it was launched: its time, its name, its stream."""

    time: int
    node: str
    stream: int

    @property
    def operator(self) -> str:
        return operator_of(self.node)

    @property
    def path(self) -> str:
        return path_of(self.node)

    @property
    def backward(self) -> bool:
        return self.node.startswith(BACKWARD)


@dataclass(frozen=True)
class Collective:
    """An exchange of data with other ranks. ``position`` is that in the order of execution; sizes are bytes.

    ``peer`` is the global rank a Send goes to or a Receive comes from.
    """

    position: int
    node: str
    operator: str
    group: str
    ranks: tuple[int, ...]
    peer: int | None
    shape: str
    dtype: str
    sent: int
    received: int

    @property
    def path(self) -> str:
        return path_of(self.node)

    @property
    def backward(self) -> bool:
        return self.node.startswith(BACKWARD)


@dataclass(frozen=True)
class Simulation:
    """One training step of ``rank`` in MindSpore's dry run. Sizes are bytes.

    ``used_peak`` is the largest sum of blocks alive at a time, ``actual_peak`` the same with the gaps between them. Workspace
    of kernels is not in it: the dry run's level 1 knows operators' inputs and outputs only. ``device_memory`` and ``limit``
    are those of the device that was pretended, and of ``context.max_device_memory``; the dry run goes on beyond both.
    ``messages`` are lines MindSpore printed that are not known to be harmless. ``planned`` are the tensors in blocks of planned
    memory (``memory_tracker.py``) at its fullest moment; these blocks are all that ``blocks`` tells of them.
    """

    rank: int
    stage: int
    device_memory: int
    limit: int
    used_peak: int
    actual_peak: int
    blocks: tuple[Block, ...]
    tasks: tuple[Task, ...]
    collectives: tuple[Collective, ...]
    messages: tuple[str, ...] = ()
    planned: tuple[Block, ...] = ()

    @property
    def fits(self) -> bool:
        """Return True if a device has the memory; it moves idle pages, so gaps between blocks do not count there."""
        return self.used_peak <= self.limit

    @cached_property
    def peak_time(self) -> int:
        """When most memory is in use, the first such time."""
        return max(self.memory_over_time(), key=lambda point: point[1])[0]

    def memory_over_time(self) -> list[tuple[int, int]]:
        """(time, bytes in use from then on) at every change."""
        changes: Counter[int] = Counter()
        for block in self.blocks:
            changes[block.start] += block.size
            if block.end is not None:
                changes[block.end] -= block.size
        used, points = 0, []
        for time in sorted(changes):
            used += changes[time]
            points.append((time, used))
        return points

    def alive(self, time: int) -> list[Block]:
        """Return the blocks in use at a time, the largest first."""
        return sorted((block for block in self.blocks if block.alive(time)), key=lambda block: -block.size)

    def peak_by_category(self) -> Mapping[str, int]:
        """Bytes of each of :data:`CATEGORIES` at the peak; they add up to ``used_peak``."""
        sums = Counter(dict.fromkeys(CATEGORIES, 0))
        for block in self.alive(self.peak_time):
            sums[block.category] += block.size
        return dict(sums)

    def lines(self) -> list[str]:
        """Return the five lines that end a dry run."""
        return [
            f"Device MOC memory size: {self.device_memory // MIB}M",
            f"MindSpore Used memory size: {self.limit // MIB}M",
            "MindSpore memory base address: 0",
            f"Used peak memory usage (without fragments): {self.used_peak // MIB}M",
            f"Actual peak memory usage (with fragments): {self.actual_peak // MIB}M",
        ]

    def save(self, path: Path | str) -> None:
        """Write it as compressed JSON."""
        tree = {"format": FORMAT, **{field.name: _columns(getattr(self, field.name)) for field in _fields(Simulation)}}
        with atomic_open(path, "wb") as file, gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as text:
            json.dump(tree, text, separators=(",", ":"))


INNER = ("tuple[int, ...]", "tuple[str, ...]")
TYPES: dict[str, set[type]] = {
    "int": {int},
    "str": {str},
    "int | None": {int, type(None)},
    "tuple[int, ...]": {int},
    "tuple[str, ...]": {str},
}
LARGEST = 1 << 64
TABLES = {"blocks": Block, "tasks": Task, "collectives": Collective, "planned": Block}


def load_simulation(path: Path | str) -> Simulation:
    """Read what :meth:`Simulation.save` wrote.

    Raises:
        UserError: the file is not there, damaged, or something else.
    """
    try:
        tree = read_compressed_json(path)
        if tree.pop("format", None) != FORMAT:
            raise ValueError("it says so itself")
        _require_types(Simulation, {name: [value] for name, value in tree.items() if name not in TABLES})
        tables = {name: tuple(_rows(kind, tree.get(name, []))) for name, kind in TABLES.items()}
        return Simulation(**{**tree, **tables, "messages": tuple(tree["messages"])})
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} is not a simulation of this version ({FORMAT}): {error}") from None


def operator_of(node: str) -> str:
    """``Default/…/MatMul-op3`` -> ``MatMul``; empty for other names."""
    name, mark, number = node.rpartition("/")[2].rpartition("-op")
    return name if mark and "/" in node and number.isdigit() else ""


def path_of(node: str) -> str:
    """Names of the cells around an operator, outermost first; other names, such as those of parameters, stay as they are."""
    if not operator_of(node):
        return node
    levels = node.removeprefix(BACKWARD).split("/")[1:-1]
    return ".".join(level.rsplit("-", 1)[0] for level in levels)


def _require_types(kind: type, columns: Mapping[str, list[Any]]) -> None:
    """Raise ValueError for values that are not of the type of their field, found column by column."""
    for field in _fields(kind):
        values = columns.get(field.name, [])
        nested = field.type in INNER and set(map(type, values)) <= {list}
        inner = list(itertools.chain.from_iterable(values)) if nested else values
        if field.type in TYPES and not set(map(type, inner)) <= TYPES[field.type]:
            raise ValueError(f"{field.name} of a {kind.__name__.lower()} is not {field.type}")
        if any(abs(value) >= LARGEST for value in inner if type(value) is int):
            raise ValueError(f"{field.name} of a {kind.__name__.lower()} is too large")
    if not set(columns.get("category", ())) <= set(CATEGORIES):
        raise ValueError("a category of memory is not known")


def _fields(kind: type) -> Iterator[Any]:
    yield from dataclasses.fields(kind)


def _columns(value: Any) -> Any:
    """Values one after another for each field: names are written once."""
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return {field.name: [getattr(row, field.name) for row in value] for field in _fields(type(value[0]))}
    return value


def _rows(kind: type, columns: Mapping[str, list[Any]] | list[Any]) -> Iterator[Any]:
    if not columns:
        return
    names = [field.name for field in _fields(kind)]
    _require_types(kind, {name: columns[name] for name in names})  # type: ignore[call-overload]
    for values in zip(*(columns[name] for name in names), strict=True):  # type: ignore[call-overload]
        yield kind(*(tuple(value) if isinstance(value, list) else value for value in values))
