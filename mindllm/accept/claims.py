"""The eight claims: what each says, and the layout under which a small run exercises it.

On several nodes tensor-parallel ranks, and ranks that share experts, stay inside a node where it has several devices; replicas
and stages cross nodes. So the profile of one exchange tells of one kind of link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindllm.config.checks.mesh import compiles_for
from mindllm.errors import UserError, nearest

BATCH = 8  # sequences of a step on one node under every layout, so that all of them compute the same losses
MOST_DEVICES, MOST_STAGES = 8, 4  # of a node, and of a pipeline
Keys = Mapping[str, object]


@dataclass(frozen=True)
class Shape:
    """Devices of a run.

    Attributes:
        devices: of all its nodes.
        nodes: that it runs on, with as many devices on each.
        batch: sequences of a step, the same in all runs of an acceptance.
    """

    devices: int = 1
    nodes: int = 1
    batch: int = BATCH

    @property
    def local(self) -> int:
        """Devices of a node."""
        return self.devices // self.nodes


Layout = Callable[[Shape], Keys]


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        name: as ``--claims`` has it.
        says: what is claimed, in a sentence.
        layout: keys of the run on such devices.
        several: whether it needs more than one device.
        experts: whether the model is a mixture of experts.
        begins: layout under which the first half is trained, which the run then resumes; None: it starts by itself.
    """

    name: str
    says: str
    layout: Layout
    several: bool = True
    experts: bool = False
    begins: Layout | None = None

    def shape(self, wanted: int, nodes: int = 1) -> Shape:
        """Return which of ``wanted`` devices the run takes: 1, 2, 4 or 8 of each node.

        Stages of one node have one each. The batch of several nodes is one that all replicas can share.
        """
        most = min(wanted // nodes, MOST_STAGES if self.name == "pp" and nodes == 1 else MOST_DEVICES)
        local = next((count for count in (8, 4, 2) if count <= most), 2 if nodes == 1 else 1)
        batch = math.lcm(BATCH, local * nodes)
        return Shape(local * nodes, nodes, batch) if self.several else Shape(batch=batch)

    def fits(self, shape: Shape) -> bool:
        """Return whether MindSpore compiles its layout for such devices."""
        return compiles_for(shape.devices, 1) and (self.name != "pp" or stages_of(shape.devices) > 1)


def stages_of(devices: int) -> int:
    """Return the most pipeline stages that share so many devices; 1 where no two can."""
    sizes = (count for count in (MOST_STAGES, 2) if devices % count == 0 and compiles_for(devices // count, count))
    return next(sizes, 1)


def _halved(devices: int, most: int) -> int:
    """Return the largest of 8, 4, 2 and 1 that divides ``devices`` and is at most ``most``."""
    return next(count for count in (8, 4, 2, 1) if count <= most and devices % count == 0)


def _one(shape: Shape) -> Keys:
    return {}


def _recomputed(shape: Shape) -> Keys:
    return {"recompute_config.recompute": True}


def _replicas(shape: Shape) -> Keys:
    return {"parallel_config.data_parallel": shape.devices, "runner_config.batch_size": shape.batch // shape.devices}


def _tensor(shape: Shape) -> Keys:
    ranks = _halved(shape.local if shape.local > 1 else shape.devices, MOST_DEVICES)
    replicas = shape.devices // ranks
    return {
        "parallel_config.data_parallel": replicas,
        "parallel_config.model_parallel": ranks,
        "parallel_config.use_seq_parallel": True,
        "runner_config.batch_size": shape.batch // replicas,
    }


def _pipeline(shape: Shape) -> Keys:
    stages = stages_of(shape.devices)
    replicas = shape.devices // stages
    micro_batches = min(MOST_STAGES, shape.batch // replicas)
    sizes = {"data_parallel": replicas, "pipeline_stage": stages, "micro_batch_num": micro_batches}
    return {
        **{f"parallel_config.{name}": value for name, value in sizes.items()},
        "runner_config.batch_size": shape.batch // (micro_batches * replicas),
    }


def _experts(shape: Shape) -> Keys:
    return {**_replicas(shape), "parallel_config.expert_parallel": _halved(shape.devices, MOST_DEVICES)}


def _sharded_optimizer(shape: Shape) -> Keys:
    return {
        **_replicas(shape),
        "parallel.enable_parallel_optimizer": True,
        "parallel.parallel_optimizer_config.parallel_optimizer_threshold": 0,
    }


CLAIMS = (
    Claim("single", "one device computes what the CPU computes", _one, several=False),
    Claim("dp", "replicas compute what one device computes", _replicas),
    Claim("tp", "tensor-parallel ranks with sequence parallel compute what one device computes", _tensor),
    Claim("pp", "pipeline stages compute what one device computes", _pipeline),
    Claim("ep", "ranks that share experts compute what one device computes", _experts, experts=True),
    Claim(
        "optimizer",
        "ranks that share the optimizer state compute what one device computes",
        _sharded_optimizer,
    ),
    Claim("recompute", "recomputed layers change memory and time, and no loss", _recomputed, several=False),
    Claim("resume", "a checkpoint of tensor-parallel ranks resumes on replicas", _sharded_optimizer, begins=_tensor),
)
BY_NAME = {claim.name: claim for claim in CLAIMS}


def chosen(names: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims of these names in the order of the table; all of them where none is named.

    Raises:
        UserError: there is no claim of a name.
    """
    for name in names:
        if name not in BY_NAME:
            raise UserError(f"--claims: there is no claim of this name (value {name}){nearest(name, BY_NAME)}")
    return tuple(claim for claim in CLAIMS if not names or claim.name in names)
