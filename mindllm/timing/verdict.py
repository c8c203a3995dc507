"""What a prediction must not hide: stages that lack memory, and a utilisation that no run has."""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.config import RunConfig
from mindllm.timing.device import Device
from mindllm.units import GIB

LEAST_UTILISATION, MOST_UTILISATION = 0.02, 1.0
"""Model FLOPs utilisation of runs that anybody has published lies between; below, figures are wrong or the run is."""


def memory_limit(config: RunConfig, device: Device) -> float:
    """Bytes that a run may take of a device: ``context.max_device_memory``, and no more than the device has."""
    return min(float(config.context.device_memory), device.memory_size.value)


@dataclass(frozen=True)
class Room:
    """The memory of every stage beside the limit of a device, in bytes."""

    stages: tuple[float, ...]
    limit: float

    @property
    def stage(self) -> int:
        """The fullest one."""
        return self.stages.index(max(self.stages))

    @property
    def missing(self) -> float:
        """What the fullest stage needs beyond the limit; 0 where all fit."""
        return max(0.0, max(self.stages) - self.limit)

    @property
    def fits(self) -> bool:
        """Whether no stage needs more."""
        return not self.missing

    def __str__(self) -> str:
        """``needs 71.3 GB on stage 0, 13.3 GB more than the limit of 58 GB``; empty where all fit."""
        if self.fits:
            return ""
        least = f"{self.missing / GIB:.1f} GB" if self.missing >= GIB / 20 else f"{self.missing / GIB:.3f} GB"
        return (
            f"needs {max(self.stages) / GIB:.1f} GB on stage {self.stage}, {least} more than the limit of "
            f"{self.limit / GIB:.4g} GB"
        )

    def tree(self) -> dict[str, object]:
        """For ``--json``, in bytes."""
        return {"fits": self.fits, "memory_limit": self.limit, "memory_missing": self.missing}


def implausible(utilisation: float) -> str:
    """Why a model FLOPs utilisation is not believed; empty where it may be."""
    if utilisation > MOST_UTILISATION:
        return f"model FLOPs utilisation of {utilisation:.0%} is more than a device has"
    if utilisation < LEAST_UTILISATION:
        return f"model FLOPs utilisation of {utilisation:.2%} is less than any run should have"
    return ""
