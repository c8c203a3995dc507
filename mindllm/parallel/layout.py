"""Named axes of the devices of a stage, and layouts of tensors over them: ``mesh.layout(("dp", "tp"), None)``.

A layout becomes the tuple of integers MindSpore's operators are sharded with. Such a tuple carries no axis names: the
compiler lays devices out along the dimensions from left to right, and ranks that hold copies innermost. So axes must be
written in the order of the mesh; any other order would compile and silently move data. Where sequences are shared, heads
``[batch, heads, seq, channels]`` have their axes in another order: these become layouts that name axes (:meth:`Mesh.named`).
Elsewhere another order is refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindllm.axes import AXES, EXPERT_TENSOR, EXPERTS, STAGE_AXES, MeshSizes, keys_of
from mindllm.config import RunConfig

if TYPE_CHECKING:
    from mindspore.parallel import Layout as NamedLayout

Dimension = str | tuple[str, ...] | None
"""The split of one dimension of a tensor: an axis, several axes (the first one outermost), or None."""
Layout = tuple[Dimension, ...]
Strategy = tuple[int, ...]

GROUP_RANKS = "ranks_of_group"
"""Attribute of a model's own communication operators, for readers of its graph. The compiler knows the ranks of its groups."""

MODEL_GROUP = "own"


def model_group_name(ranks: Sequence[int]) -> str:
    """Return the name of a model's own group of these ranks, equal on every device. Like the compiler's names it begins with the
    size.
    """
    return f"{len(ranks)}-{MODEL_GROUP}-{zlib.crc32(','.join(map(str, ranks)).encode())}"


DATA, CONTEXT, TENSOR = (axis.name for axis in STAGE_AXES)
REPLICA, EXPERT, EXPERT_RANKS = "replica", EXPERTS.name, EXPERT_TENSOR.name
"""Axes of a stage's devices, in order, for experts: replicas of groups of experts."""


@dataclass(frozen=True)
class Mesh(MeshSizes):
    """The devices: pipeline stages of data-parallel groups of tensor-parallel neighbors. If sequences are split, a data-parallel
    group consists of context-parallel groups of such neighbors, each with a part of the sequence.

    Experts are laid out differently on the devices of a stage: ``expert_parallel`` groups of ``expert_model_parallel`` neighbors
    share the experts, and the remaining axis has their replicas.
    """

    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1
    expert_parallel: int = 1
    expert_model_parallel: int | None = None
    context_parallel: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes inside a stage, the outermost first."""
        return {axis.name: self.size(axis) for axis in STAGE_AXES}

    @property
    def expert_axes(self) -> dict[str, int]:
        """Sizes of the axes of experts inside a stage, the outermost first."""
        groups, tensor = self.size(EXPERTS), self.size(EXPERT_TENSOR)
        return {REPLICA: self.stage_device_num // (groups * tensor), EXPERT: groups, EXPERT_RANKS: tensor}

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a global rank."""
        return rank // self.stage_device_num

    def ranks_along(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the global ranks that differ from ``rank`` only along ``axis`` ("pp", "dp", "cp" or "tp")."""
        number = [each.name for each in AXES].index(axis)
        size, inner = self.size(AXES[number]), self.product(AXES[number + 1 :])
        first = rank - rank // inner % size * inner
        return tuple(first + index * inner for index in range(size))

    def expert_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks that share the experts with ``rank``, each with whole experts."""
        first = rank - rank % self.expert_parallel
        return tuple(range(first, first + self.expert_parallel))

    def strategy(self, layout: Layout) -> Strategy:
        """Return the number of slices of each dimension."""
        sizes = {**self.axes, **self.expert_axes}
        return tuple(math.prod(sizes[axis] for axis in dimension_axes(dimension)) for dimension in layout)

    def named(self, layout: Layout) -> NamedLayout:
        """Return MindSpore's layout with named axes."""
        from mindspore.parallel import Layout as NamedLayout

        named = {axis for dimension in layout for axis in dimension_axes(dimension)}
        axes = self.expert_axes if named & {*self.expert_axes} else self.axes
        devices = NamedLayout(tuple(axes.values()), tuple(axes))
        return devices(*("None" if dimension is None else dimension for dimension in layout))

    def check(self, layouts: Iterable[Layout]) -> None:
        """Raise ``ValueError`` for layouts of one operator that integers cannot express on this mesh."""
        layouts = tuple(layouts)
        named = {axis for layout in layouts for dimension in layout for axis in dimension_axes(dimension)}
        sizes = self.expert_axes if named & {*self.expert_axes} else self.axes
        order = list(sizes)
        used: set[str] = set()
        for layout in layouts:
            axes = [axis for dimension in layout for axis in dimension_axes(dimension)]
            unknown = [axis for axis in axes if axis not in order]
            if unknown:
                raise ValueError(f"unknown axis '{unknown[0]}' in {layout}; axes: {', '.join(order)}")
            axes = [axis for axis in axes if sizes[axis] > 1 or axis != CONTEXT]
            if axes != sorted(set(axes), key=order.index):
                raise ValueError(f"axes of {layout} must be different and in the order {', '.join(order)}")
            used.update(axes)
        split = [axis for axis in order if axis in used and sizes[axis] > 1]
        copies = [axis for axis in order if axis not in used and sizes[axis] > 1]
        if any(order.index(copy) < order.index(axis) for copy in copies for axis in split):
            raise ValueError(f"copies along '{copies[0]}', outside of '{split[-1]}', cannot be written as integers")


def dimension_axes(dimension: Dimension) -> tuple[str, ...]:
    """Return the axes over which one dimension is split."""
    if dimension is None:
        return ()
    return (dimension,) if isinstance(dimension, str) else dimension


def mesh_of(config: RunConfig) -> Mesh:
    """Return the devices of a configuration."""
    return Mesh(**keys_of(config.parallel_config))
