"""How a trained weight is cut over the devices of a stage, computed before MindSpore's compiler cuts it.

Tensor-parallel neighbors have parts of one dimension, and groups of neighbors have some of the stacked experts each. The parallel
optimizer cuts dimension 0 of such a part again, over its replicas. An optimizer that needs more than its part of a gradient finds
the other ranks here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindllm.config import RunConfig
from mindllm.parallel.layout import Mesh
from mindllm.parallel.parameter_layout import NOT_CUT, ParameterLayout

BYTES, KILOBYTE = 4, 1024


@dataclass(frozen=True)
class WeightCut:
    """A weight over the ``devices`` of its stage.

    Attributes:
        shape: the shape of the whole weight.
        split: the dimension of which neighbors have parts; None if they have equal values.
        ways: the number of neighbors, which have equal shards.
        shards: the number of parts into which the optimizer cuts dimension 0 of such a part, over its replicas.
        devices: the devices of a stage.
        groups: the number of groups of neighbors, each with other experts. They are the outermost parts of dimension 0, which is
            not ``split`` then.
    """

    shape: tuple[int, ...]
    split: int | None = None
    ways: int = 1
    shards: int = 1
    devices: int = 1
    groups: int = 1

    @property
    def is_whole(self) -> bool:
        """True if every rank of the stage has the complete weight."""
        return self.split is None and self.groups * self.shards == 1

    @property
    def copies(self) -> int:
        """Ranks of the stage with an equal part."""
        return self.devices // ((1 if self.split is None else self.ways) * self.groups * self.shards)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of a rank's part."""
        return tuple(size // self.parts(dimension) for dimension, size in enumerate(self.shape))

    def parts(self, dimension: int) -> int:
        """Return the number of parts of a dimension."""
        return (self.ways if dimension == self.split else 1) * (self.groups * self.shards if dimension == 0 else 1)

    def part(self, dimension: int, rank: int) -> int:
        """Return the index of the part of a dimension that global ``rank`` has."""
        neighbor, group, shard, _ = self._place(rank)
        outer = neighbor if dimension == self.split else 0
        return (outer + group) * self.shards + shard if dimension == 0 else outer

    def first(self, dimension: int, rank: int) -> int:
        """Return the start in the whole dimension of the part of global ``rank``."""
        return self.part(dimension, rank) * (self.shape[dimension] // self.parts(dimension))

    def ranks_along(self, dimension: int, rank: int) -> tuple[int, ...]:
        """Return the global ranks with the parts of one dimension, in order, and equal parts of the others."""
        neighbor, group, shard, copy = self._place(rank)
        neighbors = range(self.ways) if dimension == self.split else (neighbor,)
        groups, shards = (range(self.groups), range(self.shards)) if dimension == 0 else ((group,), (shard,))
        return tuple(self._rank(rank, n, g, s, copy) for g in groups for n in neighbors for s in shards)

    def layout(self, rank: int) -> ParameterLayout:
        """Return the cut as MindSpore's layout for ``rank``."""
        matrix = (self.devices // (self.groups * self.ways), self.groups, self.ways)
        tensor_map = tuple(
            0 if n == self.split else 1 if n == 0 and self.groups > 1 else NOT_CUT for n in range(len(self.shape))
        )
        neighbor, group, _, copy = self._place(rank)
        sharing = tuple(self._rank(rank, neighbor, group, s, copy) for s in range(self.shards))
        slice_shape = tuple(
            size // (1 if axis == NOT_CUT else matrix[-1 - axis])
            for size, axis in zip(self.shape, tensor_map, strict=True)
        )
        return ParameterLayout(matrix, tensor_map, self.shape, slice_shape, "", sharing if self.shards > 1 else ())

    def _place(self, rank: int) -> tuple[int, int, int, int]:
        """Return a rank's neighbor index, group, shard and copy."""
        replica, place = divmod(rank % self.devices, self.groups * self.ways)
        group, neighbor = divmod(place, self.ways)
        copy, shard = divmod(replica, self.shards)
        return neighbor, group, shard, copy

    def _rank(self, rank: int, neighbor: int, group: int, shard: int, copy: int) -> int:
        """Return the global rank of a place in the stage of ``rank``."""
        begin = rank - rank % self.devices
        return begin + ((copy * self.shards + shard) * self.groups + group) * self.ways + neighbor


def optimizer_shards(config: RunConfig, mesh: Mesh, part_shape: tuple[int, ...], parts: int) -> int:
    """Return the number of shards into which the optimizer cuts dimension 0 of one of the ``parts`` of a weight.

    MindSpore does not cut a weight that is smaller than the threshold before tensor parallelism, or whose dimension 0 is not a
    multiple of the shards.
    """
    parallel = config.parallel
    if not parallel.enable_parallel_optimizer or not part_shape:
        return 1
    options = parallel.parallel_optimizer_config
    replicas, size = mesh.stage_device_num // parts, options.optimizer_weight_shard_size
    shards = replicas if size == -1 or replicas % size else size
    small = math.prod(part_shape) * parts * BYTES < options.parallel_optimizer_threshold * KILOBYTE
    return 1 if small or part_shape[0] % shards else shards
