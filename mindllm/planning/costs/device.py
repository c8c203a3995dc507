"""What a device can do: peaks, bandwidths, and how much of them kernels reach; a YAML in ``devices/``, or a user's own.

Every figure stands with its source, so that whoever reads a plan's step time can tell what is measured from what is assumed.
Rates are a device's own, in operations or bytes a second, and of links in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from mindllm.errors import UserError, nearest
from mindllm.planning.problem import Model, read_mapping

DEVICES = Path(__file__).parent / "devices"
DEFAULT = "ascend_910b"
SUFFIX = ".yaml"


class Rate(Model):
    """Operations or bytes a second, and where the figure is from."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: Annotated[str, Field(min_length=3)]


class Share(Model):
    """How much of a peak is reached, and where the figure is from."""

    value: Annotated[float, Field(gt=0, le=1)]
    source: Annotated[str, Field(min_length=3)]


class Efficiency(Model):
    """Shares of the peaks that kernels reach."""

    matrix: Share
    attention: Share
    vector: Share
    memory: Share
    link: Share


class Device(Model):
    """A device and its links; within a node every two devices have a link of their own, between nodes each device has one."""

    name: str
    devices_per_node: int = Field(ge=1)
    matrix_flops: Mapping[str, Rate] = Field(min_length=1, description="By dtype of the operands.")
    vector_flops: Rate
    memory_bandwidth: Rate
    link_within_node: Rate = Field(description="Of every two devices.")
    link_between_nodes: Rate
    efficiency: Efficiency

    def matrix_rate(self, dtype: str) -> float:
        """Peak of matrix products of a dtype; one that is not described has the slowest."""
        rate = self.matrix_flops.get(dtype)
        return rate.value if rate else min(known.value for known in self.matrix_flops.values())


def read_device(name: str) -> Device:
    """Reads a described device by the name of a shipped one or by the path of a YAML.

    Raises:
        UserError: no such device or file, or a key that is missing, unknown or makes no sense.
    """
    shipped = sorted(path.stem for path in DEVICES.glob(f"*{SUFFIX}"))
    path = Path(name)
    if name in shipped:
        path = DEVICES / f"{name}{SUFFIX}"
    elif not path.is_file():
        raise UserError(
            f"--device {name}: neither a file nor one of the described devices {', '.join(shipped)}{nearest(name, shipped)}"
        )
    try:
        return Device.model_validate(read_mapping(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}") from None
