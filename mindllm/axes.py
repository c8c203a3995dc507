"""The axes along which devices are laid out: one registry that checks, search, layouts, readers and the model of time walk.

Ranks are numbered along the axes from right to left: tensor-parallel ranks are neighbours, pipeline stages are furthest apart.
Another view of the same devices of a stage is that of experts: (replica, ep, etp).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    Attributes:
        name: as in ``dp2 tp4``.
        key: of section ``parallel_config``, and the attribute of whatever holds sizes.
        shares: what its ranks share out among them.
        copies_weights: whether its ranks hold the same weights, so that their gradients are added.
        always_named: in texts, where its size is 1 as well.
    """

    name: str
    key: str
    shares: str
    copies_weights: bool = False
    always_named: bool = True


DATA = Axis("dp", "data_parallel", "the batch", copies_weights=True)
CONTEXT = Axis("cp", "context_parallel", "each sequence", copies_weights=True, always_named=False)
TENSOR = Axis("tp", "model_parallel", "the weights of each layer")
PIPELINE = Axis("pp", "pipeline_stage", "the layers")
EXPERTS = Axis("ep", "expert_parallel", "the experts", always_named=False)
EXPERT_TENSOR = Axis("etp", "expert_model_parallel", "the weights of each expert", always_named=False)

STAGE_AXES = (DATA, CONTEXT, TENSOR)
"""Of the devices of a stage, the outermost first."""
AXES = (PIPELINE, *STAGE_AXES)
"""Of all devices, the outermost first."""
NAMED_AXES = (*STAGE_AXES, PIPELINE)
"""In the order in which texts name them."""
KEYS = tuple(axis.key for axis in (*NAMED_AXES, EXPERTS, EXPERT_TENSOR))
"""Keys of ``parallel_config`` that are sizes of the mesh."""


class MeshSizes:
    """Gives what has the sizes of the mesh as attributes, by the keys of ``parallel_config``, the products of them."""

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis; an expert's ranks are the tensor-parallel ones unless said otherwise."""
        size = getattr(self, axis.key)
        return self.size(TENSOR) if axis is EXPERT_TENSOR and size is None else size

    def product(self, axes: Iterable[Axis]) -> int:
        """Return the number of ranks along several axes."""
        return math.prod(self.size(axis) for axis in axes)

    @property
    def replica_num(self) -> int:
        """Ranks of a stage that hold the same weights: data-parallel ones, and those of a sequence."""
        return self.product(axis for axis in STAGE_AXES if axis.copies_weights)

    @property
    def stage_device_num(self) -> int:
        """Devices of one pipeline stage."""
        return self.product(STAGE_AXES)

    @property
    def device_num(self) -> int:
        """Devices of the mesh: the product of data, context, tensor and pipeline parallelism."""
        return self.product(AXES)

    @property
    def expert_tensor_parallel(self) -> int:
        """Ranks that share the weights of one expert."""
        return self.size(EXPERT_TENSOR)

    @property
    def shares_sequences(self) -> bool:
        """Whether several ranks share each sequence."""
        return self.size(CONTEXT) > 1

    def sizes_text(self, axes: Iterable[Axis] = NAMED_AXES, *, of: str = "key") -> str:
        """Return ``data_parallel 2 x model_parallel 4``, or by ``of="name"`` ``dp 2 x tp 4``, by ``of="size"`` ``2 x 4``.

        An axis that is not always named is left out where its size is 1.
        """
        shown = [axis for axis in axes if axis.always_named or self.size(axis) > 1]
        names = [f"{getattr(axis, of)} " if of != "size" else "" for axis in shown]
        return " x ".join(f"{name}{self.size(axis)}" for name, axis in zip(names, shown, strict=True))


def keys_of(sizes: Any) -> dict[str, Any]:
    """Return the sizes of the mesh that something holds as attributes, by the keys of ``parallel_config``."""
    return {key: getattr(sizes, key) for key in KEYS}
