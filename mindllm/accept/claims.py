"""The eight claims: what each says, and the layout under which a small run exercises it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindllm.errors import UserError, nearest

BATCH = 8  # sequences of a step under every layout, so that all of them compute the same losses
MOST_DEVICES, MOST_STAGES = 8, 4
Keys = Mapping[str, object]
Layout = Callable[[int], Keys]


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        name: as ``--claims`` has it.
        says: what is claimed, in a sentence.
        layout: keys of the run on so many devices.
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

    def devices(self, wanted: int) -> int:
        """Return how many of ``wanted`` devices the run takes: 1, 2, 4 or 8, at most a layer for each pipeline stage."""
        if not self.several:
            return 1
        most = MOST_STAGES if self.name == "pp" else MOST_DEVICES
        return next((count for count in (8, 4, 2) if count <= min(wanted, most)), 2)


def _one(devices: int) -> Keys:
    return {}


def _recomputed(devices: int) -> Keys:
    return {"recompute_config.recompute": True}


def _replicas(devices: int) -> Keys:
    return {"parallel_config.data_parallel": devices, "runner_config.batch_size": BATCH // devices}


def _tensor(devices: int) -> Keys:
    return {"parallel_config.model_parallel": devices, "parallel_config.use_seq_parallel": True}


def _pipeline(devices: int) -> Keys:
    sizes = {"pipeline_stage": devices, "micro_batch_num": MOST_STAGES}
    return {
        **{f"parallel_config.{name}": value for name, value in sizes.items()},
        "runner_config.batch_size": BATCH // MOST_STAGES,
    }


def _experts(devices: int) -> Keys:
    return {**_replicas(devices), "parallel_config.expert_parallel": devices}


def _sharded_optimizer(devices: int) -> Keys:
    return {
        **_replicas(devices),
        "parallel.enable_parallel_optimizer": True,
        "parallel.parallel_optimizer_config.parallel_optimizer_threshold": 0,
    }


CLAIMS = (
    Claim("single", "one device computes what the CPU computes", _one, several=False),
    Claim("dp", "replicas compute what one device computes", _replicas),
    Claim("tp", "tensor-parallel ranks with sequence parallel compute what one device computes", _tensor),
    Claim("pp", "pipeline stages compute what one device computes", _pipeline),
    Claim("ep", "ranks that share experts compute what one device computes", _experts, experts=True),
    Claim("optimizer", "ranks that share the optimizer state compute what one device computes", _sharded_optimizer),
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
