"""How a parameter is cut over the devices of its stage: MindSpore's tensor layout, and the part each rank keeps."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindllm.errors import shortened

NOT_CUT = -1


@dataclass(frozen=True)
class ParameterLayout:
    """MindSpore's layout of a parameter.

    Attributes:
        device_matrix: the devices of a stage as a grid; the last axis runs fastest.
        tensor_map: per dimension of the tensor the axis of the grid it is cut along, counted from the right; -1: not cut. Several
            axes where a strategy names several for a dimension, the outer ones first.
        full_shape: the shape of the whole tensor.
        slice_shape: the shape of a rank's part after tensor parallelism, before ``optimizer_group``.
        optimizer_group: communication group over which the optimizer cuts dimension 0 again; "" if it does not.
        optimizer_ranks: its global ranks, if the graph communicates in it.
        shared_by_stages: whether another stage has the parameter, too (a tied embedding).
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[int | tuple[int, ...], ...]
    full_shape: tuple[int, ...]
    slice_shape: tuple[int, ...]
    optimizer_group: str = ""
    optimizer_ranks: tuple[int, ...] = ()
    shared_by_stages: bool = False

    @classmethod
    def from_front_end(cls, layout: Sequence[Any]) -> ParameterLayout:
        """From what ``get_parameter_layout`` answers for a parameter.

        Raises:
            ValueError: no layout that a compiler makes.
        """
        devices, axes, slice_shape, _, _, group, full_shape, parts, shared, *_ = layout
        if len(axes) != len(full_shape):
            if not all(axis in range(NOT_CUT, len(devices)) for axis in axes):
                raise ValueError(f"the axes {shortened(axes)} are not axes of the devices {shortened(devices)}")
            sizes = [part * _length(devices, axis) for part, axis in zip(parts, axes, strict=True)]
            axes = _by_dimension(axes, sizes, full_shape)
        return cls(tuple(devices), tuple(axes), tuple(full_shape), tuple(slice_shape), str(group), (), bool(shared))

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """Per dimension the axes of the grid that it is cut along."""
        axis_groups = ((axis,) if isinstance(axis, int) else axis for axis in self.tensor_map)
        return tuple(tuple(axis for axis in axes if axis != NOT_CUT) for axes in axis_groups)

    def cuts(self, axes: Sequence[int]) -> int:
        """Return the number of parts into which a dimension is cut along axes."""
        return math.prod(_length(self.device_matrix, axis) for axis in axes)

    def require_consistent(self) -> None:
        """Raise ValueError or TypeError for an invalid layout, which a file may have."""
        sizes = [*map(operator.index, (*self.device_matrix, *self.full_shape, *self.slice_shape))]
        axes = [operator.index(axis) for axes in self.axes for axis in axes]
        if len(self.axes) != len(self.full_shape) or min(sizes, default=1) < 1 or max(sizes, default=1) >= 1 << 48:
            raise ValueError(
                f"a layout of shape {shortened(self.full_shape)} has the axes {shortened(self.tensor_map)}"
            )
        if not all(0 <= axis < len(self.device_matrix) for axis in axes):
            raise ValueError(f"the axes {shortened(axes)} are not axes of the devices {shortened(self.device_matrix)}")

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> ParameterLayout:
        """From a mapping of its fields, as ``dataclasses.asdict`` makes them."""
        return cls(**{key: _tuples(value) for key, value in tree.items()})

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Return the part of the whole tensor that global ``rank`` has, one slice per dimension."""
        place = self._place(rank)
        cuts = []
        for size, axes in zip(self.full_shape, self.axes, strict=True):
            index = 0
            for axis in axes:
                index = index * self.cuts([axis]) + place[axis]
            cuts.append(_part(0, size, self.cuts(axes), index))
        if self.optimizer_ranks:
            first, length = cuts[0]
            cuts[0] = _part(first, length, len(self.optimizer_ranks), self.optimizer_ranks.index(rank))
        return tuple(slice(first, first + length) for first, length in cuts)

    def copies_before(self, rank: int) -> int:
        """Return how many lower ranks of the stage have an equal part.

        The optimizer's groups divide the ranks with equal slices: either neighbors form a group, or every n-th rank does.
        """
        stage_devices = math.prod(self.device_matrix)
        first = rank - rank % stage_devices
        mapped = [axis for axes in self.axes for axis in axes]
        place = self._place(rank)
        copies = [
            device
            for device in range(first, first + stage_devices)
            if all(self._place(device)[axis] == place[axis] for axis in mapped)
        ]
        if not self.optimizer_ranks:
            return copies.index(rank)
        positions = [copies.index(device) for device in self.optimizer_ranks]
        neighbors = len(positions) == 1 or positions[1] == positions[0] + 1
        return positions[0] // len(positions) if neighbors else positions[0]

    def _place(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank in the grid, counted from the right like ``tensor_map``."""
        rest = rank % math.prod(self.device_matrix)
        coordinates = []
        for size in reversed(self.device_matrix):
            rest, coordinate = divmod(rest, size)
            coordinates.append(coordinate)
        return tuple(coordinates)


def _length(devices: Sequence[int], axis: int) -> int:
    """Return the number of devices along an axis of their grid."""
    return 1 if axis == NOT_CUT else devices[-1 - axis]


def _by_dimension(axes: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the axes of each dimension if MindSpore has represented one that is cut along several axes as several dimensions.

    Args:
        sizes: of these dimensions.

    Raises:
        ValueError: they do not make up ``shape``.
    """
    rest, result = list(zip(axes, sizes, strict=True)), []
    for remaining, size in zip(range(len(shape) - 1, -1, -1), shape, strict=True):
        dimension_axes, length_product = list[int](), 1
        while rest and (not dimension_axes or length_product < size or (rest[0][1] == 1 and len(rest) > remaining)):
            axis, length = rest.pop(0)
            dimension_axes.append(axis)
            length_product *= length
        result.append(tuple(dimension_axes))
        if length_product != size:
            raise ValueError(f"dimensions of {shortened(list(sizes))} do not make up {shortened(list(shape))}")
    return tuple(result)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _part(first: int, length: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and length of one of equal parts of a range."""
    return first + length // parts * index, length // parts
