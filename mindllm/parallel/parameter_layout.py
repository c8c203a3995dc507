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
        tensor_map: per dimension of the tensor the axis of the grid it is cut along, counted from the right; -1: not cut.
        full_shape: of the whole tensor.
        slice_shape: of the part that tensor parallelism leaves on a rank, before ``optimizer_group``.
        optimizer_group: communication group over which the optimizer cuts dimension 0 once more; "" if it does not.
        optimizer_ranks: its global ranks, where the graph communicates in it.
        shared_by_stages: whether another stage holds the same parameter (a tied embedding).
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...]
    full_shape: tuple[int, ...]
    slice_shape: tuple[int, ...]
    optimizer_group: str = ""
    optimizer_ranks: tuple[int, ...] = ()
    shared_by_stages: bool = False

    @classmethod
    def from_front_end(cls, layout: Sequence[Any]) -> ParameterLayout:
        """From what ``get_parameter_layout`` answers for a parameter."""
        devices, tensor_map, slice_shape, _, _, group, full_shape, _, shared, *_ = layout
        return cls(
            tuple(devices), tuple(tensor_map), tuple(full_shape), tuple(slice_shape), str(group), (), bool(shared)
        )

    def require_consistent(self) -> None:
        """Raises ValueError or TypeError for a layout that no compiler makes, as a file of somebody else may hold."""
        sizes = [*map(operator.index, (*self.device_matrix, *self.full_shape, *self.slice_shape))]
        axes = [*map(operator.index, self.tensor_map)]
        if len(axes) != len(self.full_shape) or min(sizes, default=1) < 1 or max(sizes, default=1) >= 1 << 48:
            raise ValueError(f"a layout of shape {shortened(self.full_shape)} has the axes {shortened(axes)}")
        if not all(axis == NOT_CUT or 0 <= axis < len(self.device_matrix) for axis in axes):
            raise ValueError(f"the axes {shortened(axes)} are none of the devices {shortened(self.device_matrix)}")

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> ParameterLayout:
        """From a mapping of its fields, as ``dataclasses.asdict`` makes them."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()
        }
        return cls(**values)

    def slices(self, rank: int) -> tuple[slice, ...]:
        """The part of the whole tensor that global ``rank`` keeps, one slice per dimension."""
        place = self._place(rank)
        cuts = [
            _part(
                0, size, 1 if axis == NOT_CUT else self.device_matrix[-1 - axis], 0 if axis == NOT_CUT else place[axis]
            )
            for size, axis in zip(self.full_shape, self.tensor_map, strict=True)
        ]
        if self.optimizer_ranks:
            first, length = cuts[0]
            cuts[0] = _part(first, length, len(self.optimizer_ranks), self.optimizer_ranks.index(rank))
        return tuple(slice(first, first + length) for first, length in cuts)

    def copies_before(self, rank: int) -> int:
        """How many ranks of the stage below ``rank`` keep the same part.

        Optimizers' groups divide the ranks with the same slice: either neighbours form a group, or every n-th does.
        """
        stage_devices = math.prod(self.device_matrix)
        first = rank - rank % stage_devices
        mapped = [axis for axis in self.tensor_map if axis != NOT_CUT]
        place = self._place(rank)
        copies = [
            other
            for other in range(first, first + stage_devices)
            if all(self._place(other)[axis] == place[axis] for axis in mapped)
        ]
        if not self.optimizer_ranks:
            return copies.index(rank)
        positions = [copies.index(other) for other in self.optimizer_ranks]
        neighbours = len(positions) == 1 or positions[1] == positions[0] + 1
        return positions[0] // len(positions) if neighbours else positions[0]

    def _place(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank in the grid, counted from the right like ``tensor_map``."""
        rest = rank % math.prod(self.device_matrix)
        coordinates = []
        for size in reversed(self.device_matrix):
            rest, coordinate = divmod(rest, size)
            coordinates.append(coordinate)
        return tuple(coordinates)


def _part(first: int, length: int, parts: int, index: int) -> tuple[int, int]:
    """Beginning and length of one of equal parts of a range."""
    return first + length // parts * index, length // parts
