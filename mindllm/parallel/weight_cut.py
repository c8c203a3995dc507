"""How a trained weight is cut over the devices of a stage, known before MindSpore's compiler cuts it.

Tensor-parallel neighbours have parts of one dimension; of stacked experts, groups of neighbours have some each. The parallel
optimizer cuts dimension 0 of such a part once more, over the replicas that hold it. An optimizer that needs more than its part of
a gradient asks here who has the rest.
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
        shape: of the whole weight.
        split: the dimension that neighbours have parts of; None: they have the same.
        ways: neighbours; they have the same shards.
        shards: parts that the optimizer cuts dimension 0 of such a part into, over ranks that would hold copies.
        devices: of a stage.
        groups: of neighbours, each with other experts: the outermost parts of dimension 0, which is not ``split`` then.
    """

    shape: tuple[int, ...]
    split: int | None = None
    ways: int = 1
    shards: int = 1
    devices: int = 1
    groups: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the stage has all of it."""
        return self.split is None and self.groups * self.shards == 1

    @property
    def copies(self) -> int:
        """Ranks of the stage that hold the same part."""
        return self.devices // ((1 if self.split is None else self.ways) * self.groups * self.shards)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of a rank's part."""
        return tuple(size // self.parts(dimension) for dimension, size in enumerate(self.shape))

    def parts(self, dimension: int) -> int:
        """Into how many parts a dimension is cut."""
        return (self.ways if dimension == self.split else 1) * (self.groups * self.shards if dimension == 0 else 1)

    def part(self, dimension: int, rank: int) -> int:
        """The number of the part that global ``rank`` has of a dimension."""
        neighbour, group, shard, _ = self._place(rank)
        outer = neighbour if dimension == self.split else 0
        return (outer + group) * self.shards + shard if dimension == 0 else outer

    def first(self, dimension: int, rank: int) -> int:
        """Where in the whole dimension the part of global ``rank`` begins."""
        return self.part(dimension, rank) * (self.shape[dimension] // self.parts(dimension))

    def ranks_along(self, dimension: int, rank: int) -> tuple[int, ...]:
        """Global ranks with the parts of one dimension, in its order, that are beside that of ``rank`` in the others."""
        neighbour, group, shard, copy = self._place(rank)
        neighbours = range(self.ways) if dimension == self.split else (neighbour,)
        groups, shards = (range(self.groups), range(self.shards)) if dimension == 0 else ((group,), (shard,))
        return tuple(self._rank(rank, n, g, s, copy) for g in groups for n in neighbours for s in shards)

    def layout(self, rank: int) -> ParameterLayout:
        """The same as MindSpore says it of ``rank``."""
        matrix = (self.devices // (self.groups * self.ways), self.groups, self.ways)
        tensor_map = tuple(
            0 if n == self.split else 1 if n == 0 and self.groups > 1 else NOT_CUT for n in range(len(self.shape))
        )
        neighbour, group, _, copy = self._place(rank)
        sharing = tuple(self._rank(rank, neighbour, group, s, copy) for s in range(self.shards))
        slice_shape = tuple(
            size // (1 if axis == NOT_CUT else matrix[-1 - axis])
            for size, axis in zip(self.shape, tensor_map, strict=True)
        )
        return ParameterLayout(matrix, tensor_map, self.shape, slice_shape, "", sharing if self.shards > 1 else ())

    def _place(self, rank: int) -> tuple[int, int, int, int]:
        """Which neighbour a rank is, in which group, which shard it has, and the number of the copy."""
        replica, place = divmod(rank % self.devices, self.groups * self.ways)
        group, neighbour = divmod(place, self.ways)
        copy, shard = divmod(replica, self.shards)
        return neighbour, group, shard, copy

    def _rank(self, rank: int, neighbour: int, group: int, shard: int, copy: int) -> int:
        """The global rank of a place of the stage of ``rank``."""
        begin = rank - rank % self.devices
        return begin + ((copy * self.shards + shard) * self.groups + group) * self.ways + neighbour


def optimizer_shards(config: RunConfig, mesh: Mesh, part_shape: tuple[int, ...], parts: int) -> int:
    """Into how many shards the optimizer cuts dimension 0 of what tensor parallelism leaves of a weight in so many ``parts``.

    MindSpore leaves a weight whole that is smaller than the threshold before tensor parallelism cuts it, or whose dimension 0 the
    shards would not divide.
    """
    parallel = config.parallel
    if not parallel.enable_parallel_optimizer or not part_shape:
        return 1
    options = parallel.parallel_optimizer_config
    replicas, size = mesh.stage_device_num // parts, options.optimizer_weight_shard_size
    shards = replicas if size == -1 or replicas % size else size
    small = math.prod(part_shape) * parts * BYTES < options.parallel_optimizer_threshold * KILOBYTE
    return 1 if small or part_shape[0] % shards else shards
