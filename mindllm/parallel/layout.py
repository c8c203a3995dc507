"""Named axes of the devices of a stage, and layouts of tensors over them: ``mesh.layout(("dp", "tp"), None)``.

A layout becomes the tuple of integers MindSpore's operators are sharded with. Such a tuple carries no axis names: the
compiler lays devices out along the dimensions from left to right, and ranks that hold copies innermost. So axes must be
written in the order of the mesh; any other order would compile and silently move data. Where sequences are shared, heads
``[batch, heads, seq, channels]`` have their axes in another order: these become layouts that name axes (:meth:`Mesh.named`).
Elsewhere another order is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindllm.config import RunConfig

if TYPE_CHECKING:
    from mindspore.parallel import Layout as NamedLayout

Dimension = str | tuple[str, ...] | None
"""What one dimension of a tensor is split over: an axis, several axes (the first one outermost), or nothing."""
Layout = tuple[Dimension, ...]
Strategy = tuple[int, ...]

RANKS_OF_GROUP = "ranks_of_group"
"""Attribute of exchanges that a model itself has, for whoever reads its graph: the compiler knows the ranks of its own groups."""

DATA, CONTEXT, TENSOR = "dp", "cp", "tp"
REPLICA, EXPERT, EXPERT_TENSOR = "replica", "ep", "etp"
"""Axes of the same devices, in the same order, as experts are laid out on them: replicas of groups of experts."""


@dataclass(frozen=True)
class Mesh:
    """The devices: pipeline stages, and in each of them data-parallel groups of tensor-parallel neighbours. Where sequences are
    shared, a data-parallel group is context-parallel groups of such neighbours, each with its part of the sequence.

    Experts see those of a stage otherwise: ``expert_parallel`` groups of ``expert_tensor_parallel`` neighbours share the experts,
    and what is left are replicas of them.
    """

    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    context_parallel: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes inside a stage, the outermost first."""
        return {DATA: self.data_parallel, CONTEXT: self.context_parallel, TENSOR: self.model_parallel}

    @property
    def expert_axes(self) -> dict[str, int]:
        """Sizes of the axes of experts inside a stage, the outermost first."""
        tensor = self.expert_tensor_parallel or self.model_parallel
        replicas = self.stage_devices // (self.expert_parallel * tensor)
        return {REPLICA: replicas, EXPERT: self.expert_parallel, EXPERT_TENSOR: tensor}

    @property
    def stage_devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def devices(self) -> int:
        return self.stage_devices * self.pipeline_stage

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a global rank."""
        return rank // self.stage_devices

    def ranks_along(self, axis: str, rank: int) -> tuple[int, ...]:
        """Global ranks that differ from ``rank`` only along ``axis`` ("pp", "dp", "cp" or "tp")."""
        shared = self.context_parallel * self.model_parallel
        inner = {"tp": 1, "cp": self.model_parallel, "dp": shared, "pp": self.stage_devices}[axis]
        size = {**self.axes, "pp": self.pipeline_stage}[axis]
        first = rank - rank // inner % size * inner
        return tuple(first + index * inner for index in range(size))

    def expert_ranks(self, rank: int) -> tuple[int, ...]:
        """Global ranks that share the experts with ``rank``, where each has whole ones."""
        first = rank - rank % self.expert_parallel
        return tuple(range(first, first + self.expert_parallel))

    def strategy(self, layout: Layout) -> Strategy:
        """Number of slices of each dimension."""
        sizes = {**self.axes, **self.expert_axes}
        return tuple(math.prod(sizes[axis] for axis in axes_of(dimension)) for dimension in layout)

    def named(self, layout: Layout) -> NamedLayout:
        """MindSpore's layout that names its axes."""
        from mindspore.parallel import Layout as NamedLayout

        named = {axis for dimension in layout for axis in axes_of(dimension)}
        axes = self.expert_axes if named & {*self.expert_axes} else self.axes
        devices = NamedLayout(tuple(axes.values()), tuple(axes))
        return devices(*("None" if dimension is None else dimension for dimension in layout))

    def check(self, layouts: Iterable[Layout]) -> None:
        """Raises ``ValueError`` for layouts of one operator that integers cannot express on this mesh."""
        layouts = tuple(layouts)
        named = {axis for layout in layouts for dimension in layout for axis in axes_of(dimension)}
        sizes = self.expert_axes if named & {*self.expert_axes} else self.axes
        order = list(sizes)
        used: set[str] = set()
        for layout in layouts:
            axes = [axis for dimension in layout for axis in axes_of(dimension)]
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


def axes_of(dimension: Dimension) -> tuple[str, ...]:
    """The axes one dimension is split over."""
    if dimension is None:
        return ()
    return (dimension,) if isinstance(dimension, str) else dimension


def mesh_of(config: RunConfig) -> Mesh:
    """The devices of a configuration."""
    sizes = config.parallel_config
    return Mesh(
        sizes.data_parallel,
        sizes.model_parallel,
        sizes.pipeline_stage,
        sizes.expert_parallel,
        sizes.expert_tensor_parallel,
        sizes.context_parallel,
    )
