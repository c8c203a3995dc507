"""What a prediction must not hide: stages that lack memory, and a utilisation that no run has."""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.config import RunConfig
from mindllm.timing.device import Device
from mindllm.units import GIB, device_memory

LEAST_UTILISATION, MOST_UTILISATION = 0.02, 1.0
"""Model FLOPs utilisation of runs that anybody has published lies between; below, figures are wrong or the run is."""


RESERVED = 0.05
"""Share of a device's memory limit that estimates by formula leave free, for the workspace of kernels, pages that blocks fill in
part, and errors of the formula. Figures of a dry run are compared with the whole limit. All commands take it from here.
"""


def usable_memory(limit: float, reserved: float = RESERVED) -> float:
    """Return the bytes of a limit that stages may fill."""
    return limit * (1 - reserved)


def limit_text(limit: float, reserved: float = RESERVED) -> str:
    """Return a limit in bytes with its margin: ``limit 58.00 GB, 5% reserved: 55.10 GB``."""
    if not reserved:
        return f"limit {device_memory(limit)}, none reserved"
    return f"limit {device_memory(limit)}, {reserved:.0%} reserved: {device_memory(usable_memory(limit, reserved))}"


def memory_limit(config: RunConfig, device: Device) -> float:
    """Bytes that a run may take of a device: ``context.max_device_memory``, and no more than the device has."""
    return min(float(config.context.device_memory), device.memory_size.value)


@dataclass(frozen=True)
class Room:
    """The memory of every stage next to the limit of a device, in bytes.

    Attributes:
        stages: what every stage needs.
        limit: what a run may take of a device.
        reserved: share of the limit that stays free; 0 where a dry run measured the figures.
    """

    stages: tuple[float, ...]
    limit: float
    reserved: float = RESERVED

    @property
    def usable(self) -> float:
        """Bytes that a stage may fill."""
        return usable_memory(self.limit, self.reserved)

    @property
    def bound(self) -> str:
        """What a stage may fill, in words: ``55.1 GB (limit 58 GB, 5% reserved)``, or ``58 GB`` where nothing is reserved."""
        limit = f"{self.limit / GIB:.4g} GB"
        return f"{self.usable / GIB:.1f} GB (limit {limit}, {self.reserved:.0%} reserved)" if self.reserved else limit

    @property
    def stage(self) -> int:
        """The fullest stage."""
        return self.stages.index(max(self.stages))

    @property
    def missing(self) -> float:
        """Bytes that the fullest stage needs beyond what it may fill; 0 if all stages fit."""
        return max(0.0, max(self.stages) - self.usable)

    @property
    def fits(self) -> bool:
        """Return True if every stage fits."""
        return not self.missing

    @property
    def short(self) -> str:
        """``stage 0 needs 71.3 GB of 55.1 GB``; a digit more where both figures would read alike. Empty if all stages fit."""
        if self.fits:
            return ""
        digits = 1 if self.missing >= GIB / 20 else 3
        return f"stage {self.stage} needs {max(self.stages) / GIB:.{digits}f} GB of {self.usable / GIB:.{digits}f} GB"

    def __str__(self) -> str:
        """``needs 71.3 GB on stage 0, 16.2 GB more than 55.1 GB (limit 58 GB, 5% reserved)``; empty if all stages fit."""
        if self.fits:
            return ""
        least = f"{self.missing / GIB:.1f} GB" if self.missing >= GIB / 20 else f"{self.missing / GIB:.3f} GB"
        most = self.bound if self.reserved else f"the limit of {self.bound}"
        return f"needs {max(self.stages) / GIB:.1f} GB on stage {self.stage}, {least} more than {most}"

    def tree(self) -> dict[str, object]:
        """Return plain values, in bytes; ``memory_reserved`` is a share of the limit."""
        return {
            "fits": self.fits,
            "memory_limit": self.limit,
            "memory_reserved": self.reserved,
            "memory_missing": self.missing,
        }


def implausible(utilisation: float) -> str:
    """Why a model FLOPs utilisation is not believed; empty where it may be."""
    if utilisation > MOST_UTILISATION:
        return f"model FLOPs utilisation of {utilisation:.0%} is more than a device has"
    if utilisation < LEAST_UTILISATION:
        return f"model FLOPs utilisation of {utilisation:.2%} is less than any run should have"
    return ""
