"""A checkpoint of MindFormers' ranks, ``rank_0/net_rank_0-3_2.ckpt`` and so on, as whole tensors.

Each rank keeps what it holds; how that was cut stands in strategy files, which MindFormers writes into ``strategy`` beside the
directory of checkpoints.

MindSpore's strategy files say how the parameters of a rank were cut, so that the parts of all ranks make whole tensors again.

``node_strategy.proto`` of MindSpore: for every parameter a matrix of devices (slowest dimension first), for every axis of it the
dimensions that cut it (counted from the fastest, -1: none), and over how many of the devices that hold the same part the
optimizer's parallelism cuts the first axis once more.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.outside import read_bytes
from mindllm.train.checkpoint.parts import PartedTensor, whole_of_parts
from mindllm.weight_files.files import tensors_of_file
from mindllm.weight_files.wire import Message

Shape = tuple[int, ...]
RANK = re.compile(r"rank_(\d+)")
STEP = re.compile(r"-(\d+)_(\d+)$")  # of an epoch and a step in it
SUFFIXES = (".safetensors", ".ckpt")
Parts = dict[str, dict[tuple[int, ...], Any]]  # name: start: tensor


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut. ``axes``: for every axis the dimensions of ``devices`` that cut it, outer first, slowest is 0.

    Without axes it is whole everywhere.
    """

    devices: Shape
    axes: tuple[Shape, ...]
    optimizer: int = 1  # into how many parts the first axis of what a device would hold is cut again

    def start(self, rank: int, shape: Shape) -> Shape:
        """Where in the whole tensor the part of ``shape`` lies that ``rank`` holds."""
        if not self.axes:
            return (0,) * len(shape)
        place = _coordinates(rank % math.prod(self.devices), self.devices)
        starts = [_index(place, self.devices, cut) * size for cut, size in zip(self.axes, shape, strict=True)]
        if self.optimizer > 1:
            first = _index(place, self.devices, self.axes[0]) * self.optimizer
            starts[0] = (first + _index(place, self.devices, self.repeated()) % self.optimizer) * shape[0]
        return tuple(starts)

    def whole(self, shape: Shape) -> Shape:
        """The shape of the whole tensor, of which each rank holds a part of ``shape``."""
        if not self.axes:
            return shape
        counts = [math.prod(self.devices[dimension] for dimension in cut) for cut in self.axes]
        sizes = [size * count for size, count in zip(shape, counts, strict=True)]
        return (sizes[0] * self.optimizer, *sizes[1:])

    def repeated(self) -> Shape:
        """The dimensions along which devices hold the same part."""
        used = {dimension for cut in self.axes for dimension in cut}
        return tuple(dimension for dimension in range(len(self.devices)) if dimension not in used)


def read_strategy(path: Path) -> dict[str, Layout]:
    """The layout of every parameter in a strategy file; in a merged one, names begin with the stage: ``0-model...``.

    Raises:
        UserError: not such a file.
    """
    try:
        items = Message(read_bytes(path)).messages(3)
        return {item.text(1): _layout(item.message(2)) for item in items}
    except (IndexError, ValueError) as error:
        raise UserError(f"{path}: not a strategy file of MindSpore ({error})") from None


def _layout(message: Message) -> Layout:
    devices = tuple(message.message(1).numbers(1))
    maps = [entry.numbers(1) for entry in message.messages(2)]
    # One map of all axes, or a map for each axis where several dimensions may cut one.
    cuts = [[dimension] for dimension in maps[0]] if len(maps) == 1 else maps
    axes = tuple(tuple(len(devices) - 1 - dimension for dimension in cut if dimension >= 0) for cut in cuts)
    if any(not 0 <= dimension < len(devices) for cut in axes for dimension in cut) or math.prod(devices) < 1:
        raise ValueError(f"devices {devices} and axes {cuts} do not fit")
    step, size = message.number(6), message.number(7)
    whole = Layout(devices, axes)
    if not step or not size:
        return whole
    copies = math.prod(devices[dimension] for dimension in whole.repeated())
    return Layout(devices, axes, copies if size < 0 else size)


def _coordinates(rank: int, devices: Shape) -> Shape:
    return tuple(rank // math.prod(devices[index + 1 :]) % size for index, size in enumerate(devices))


def _index(place: Shape, devices: Shape, dimensions: Shape) -> int:
    """The number of a place among those that differ in ``dimensions`` only, the first of them the slowest."""
    index = 0
    for dimension in dimensions:
        index = index * devices[dimension] + place[dimension]
    return index


def rank_directories(directory: Path) -> dict[int, Path]:
    """The directories ``rank_N`` in ``directory`` by their rank, in order."""
    matches = [(RANK.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def rank_files(directory: Path) -> dict[int, Path]:
    """One file of every rank, of the newest step that all of them have.

    Raises:
        UserError: ranks are missing, or have no step in common.
    """
    found = {rank: _by_step(path) for rank, path in rank_directories(directory).items()}
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        raise UserError(
            f"{directory}: rank_{missing[0]} is missing, there is a rank_{max(found)}; get the files of all ranks"
        )
    common = set.intersection(*(set(steps) for steps in found.values()))
    if not common:
        empty = next((rank for rank, steps in found.items() if not steps), None)
        why = "the ranks have no step in common" if empty is None else f"rank_{empty} has no {' or '.join(SUFFIXES)}"
        raise UserError(f"{directory}: {why}; get the files of all ranks")
    return {rank: steps[max(common)] for rank, steps in found.items()}


def _by_step(directory: Path) -> dict[tuple[int, int], Path]:
    """The files of a rank by epoch and step; one whose name tells neither is that of step 0."""
    files = [path for path in sorted(directory.iterdir()) if path.suffix in SUFFIXES]
    matches = [(STEP.search(path.stem), path) for path in files]
    return {(int(match[1]), int(match[2])) if match else (0, 0): path for match, path in matches}


def strategy_files(directory: Path, ranks: int) -> dict[int, Path]:
    """The strategy file of every rank, or one for all of them; none where there are none near ``directory``."""
    for place in (directory / "strategy", directory.parent / "strategy"):
        own = {rank: path for rank in range(ranks) for path in place.glob(f"*_rank_{rank}.ckpt")}
        if len(own) == ranks:
            return own
        merged = sorted(place.glob("*.ckpt"))
        if len(merged) == 1:
            return dict.fromkeys(range(ranks), merged[0])
    return {}


def tensors_of_ranks(directory: Path) -> dict[str, Any]:
    """The whole tensors of all ranks. Without strategy files a tensor is what the first rank has of it.

    Raises:
        UserError: files are missing or damaged, or the parts of a tensor make no whole.
    """
    files = rank_files(directory)
    strategies = strategy_files(directory, len(files))
    layouts = {path: read_strategy(path) for path in set(strategies.values())}
    parts: Parts = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, path in files.items():
        known = layouts[strategies[rank]] if strategies else {}
        for name, tensor in tensors_of_file(path).items():
            layout = _layout_of(known, name, rank)
            try:
                start, shape = layout.start(rank, tensor.shape), layout.whole(tensor.shape)
            except ValueError:
                raise UserError(
                    f"{path}: tensor {name} {list(tensor.shape)} is not of the strategy {strategies[rank]}"
                ) from None
            if shapes.setdefault(name, shape) != shape:
                raise UserError(
                    f"{path}: tensor {name} is of shape {list(tensor.shape)} here, otherwise in another rank"
                )
            parts.setdefault(name, {}).setdefault(start, tensor)
    return {name: _whole(directory, name, shapes[name], found) for name, found in parts.items()}


def _layout_of(layouts: dict[str, Layout], name: str, rank: int) -> Layout:
    """How a tensor was cut; one that no strategy names is whole."""
    ends = [known for known in layouts if known == name or known.partition("-")[2] == name]
    stages = {known: rank // math.prod(layouts[known].devices) for known in ends}
    own = next((known for known in ends if known == name or known == f"{stages[known]}-{name}"), None)
    return layouts[own] if own is not None else Layout((), ())


def _whole(directory: Path, name: str, shape: tuple[int, ...], parts: dict[tuple[int, ...], Any]) -> PartedTensor | Any:
    if len(parts) == 1 and next(iter(parts.values())).shape == shape:
        return next(iter(parts.values()))
    try:
        return whole_of_parts(name, shape, list(parts.items()))
    except ValueError as error:
        raise UserError(f"{directory}: {error}") from None
