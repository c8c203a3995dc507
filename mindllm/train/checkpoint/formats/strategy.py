"""MindSpore's strategy files: how the parameters of a rank were cut, so that the parts of all ranks make whole tensors again.

``node_strategy.proto`` of MindSpore: for every parameter a matrix of devices (slowest dimension first), for every axis of it the
dimensions that cut it (counted from the fastest, -1: none), and over how many of the devices that hold the same part the
optimizer's parallelism cuts the first axis once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mindllm.errors import UserError
from mindllm.outside import read_bytes
from mindllm.train.checkpoint.formats.wire import Message

Shape = tuple[int, ...]


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
