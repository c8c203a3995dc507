"""What a device and its links can do, and how much of it kernels reach: a YAML in ``devices/``, or a user's own.

Every figure stands with its source, so that whoever reads a predicted step time can tell what is measured from what is assumed.
Rates are a device's own, in operations or bytes a second, and of links in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from mindllm.config.reading.problems import plain_message
from mindllm.config.reading.yaml_tree import read_mapping
from mindllm.config.section import StrictModel
from mindllm.errors import UserError, nearest
from mindllm.timing.shipped import DEFAULT as DEFAULT
from mindllm.timing.shipped import DEVICES, SUFFIX, shipped_devices

Source = Annotated[str, Field(min_length=3)]


class Figure(StrictModel):
    """A figure of a data sheet in operations, bytes, or a second of either, and where it is from."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: Source


class Share(StrictModel):
    """How much of something is reached, where the figure is from, and what it was assumed to be before it was calibrated."""

    value: Annotated[float, Field(gt=0, le=1)]
    source: Source
    assumed: Annotated[float, Field(gt=0, le=1)] | None = None


class Span(StrictModel):
    """Seconds or elements that something costs, none allowed, and likewise."""

    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    source: Source
    assumed: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class Link(StrictModel):
    """What joins devices whose numbers share ``rank // devices``.

    A ``mesh`` gives every two devices a link of ``bandwidth``; behind a ``switch`` each device has one port of ``bandwidth``, of
    which ``oversubscription`` devices share what their traffic crosses.
    """

    name: str
    devices: int | None = Field(ge=2, description="How many neighbours it joins; null: all there are.")
    topology: Literal["mesh", "switch"]
    bandwidth: Figure
    efficiency: Share
    latency: Span = Field(description="Seconds of an exchange of next to nothing.")
    oversubscription: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    part_groups: Share | None = Field(
        default=None,
        description="Part of the bandwidth that groups reach together which have several devices of a node each, but not all: "
        "where their rings take the same ports; null: all of it.",
    )

    def rate(self, members: int, part_of_node: bool = False) -> float:
        """Bytes a second that each of so many devices sends to the others at once."""
        ports = members - 1 if self.topology == "mesh" else 1
        reached = self.part_groups.value if part_of_node and self.part_groups else 1.0
        return self.bandwidth.value * self.efficiency.value * ports * reached / self.oversubscription


class Efficiency(StrictModel):
    """What kernels reach of the peaks, and what they cost beside.

    ``half_size``: a matrix product of [m, k] x [k, n] takes 1 + half_size (1/m + 1/k + 1/n) times as long as a large one:
    tiles that are not full, pipelines that fill and drain. ``attention`` is reached with heads of ``attention_head`` numbers:
    where that is given the softmax decides, and a score of a narrower head takes as long; null: products decide.
    ``float16_casts``: of the memory's rate, by the casts to and from that type between which a CPU computes a product of it, and
    all else that it does in that type; null: no more than that. ``launch``: seconds of an operator beside its work. ``host``:
    seconds in which the host gives an operator to the device; a pass never takes less than that for all its operators.
    """

    matrix: Share
    half_size: Span
    float16_casts: Share | None = None
    bfloat16_casts: Share | None = None
    attention: Share
    attention_head: Figure | None = None
    vector: Share
    memory: Share
    launch: Span
    host: Span


class Device(StrictModel):
    """A device, its links from the innermost to the outermost, and what of them is reached."""

    name: str
    software: Literal["mindspore", "megatron", "cpu"] = Field(
        description="What the efficiencies are of: which operators are fused, and whether sends block a stage; cpu: MindSpore's "
        "kernels of a CPU, where attention is composed of operators."
    )
    memory_size: Figure
    matrix_flops: Mapping[str, Figure] = Field(min_length=1, description="By dtype of the operands.")
    vector_flops: Figure
    memory_bandwidth: Figure
    cores: int | None = Field(
        default=None,
        ge=1,
        description="Of a CPU, whose figures are those of all its cores: how many there are for the processes of a run, each of "
        "which has its part; null: every rank has a device of its own.",
    )
    host_bandwidth: Figure | None = Field(
        default=None, description="Bytes a second to the host's memory, and as many back; null: not known."
    )
    links: tuple[Link, ...] = Field(min_length=1)
    efficiency: Efficiency
    overlap: Share = Field(description="Part of the exchanges between replicas that runs behind computation.")
    gradient_overlap: Share | None = Field(
        default=None,
        description="Part of the sums of gradients between tensor-parallel ranks that runs behind gradients of weights; "
        "null: none.",
    )
    step_overhead: Span = Field(description="Seconds of a step beside all that is modelled: data, host, logging.")
    step_error: Share | None = Field(
        default=None,
        description="Share of a predicted step within which about nine of ten measured steps were that nothing was fitted to; "
        "null: no such step was at hand.",
    )

    @model_validator(mode="after")
    def _links_widen(self) -> Device:
        reaches = [link.devices or float("inf") for link in self.links]
        if any(outer <= inner for inner, outer in pairwise(reaches)):
            raise ValueError("links: each must join more devices than the one before it")
        return self

    def matrix_rate(self, dtype: str) -> float:
        """Peak of matrix products of a dtype.

        Raises:
            UserError: the device has no such figure.
        """
        if dtype not in self.matrix_flops:
            raise UserError(
                f"device {self.name}: matrix_flops has no {dtype}, which the run computes in; "
                f"it has {', '.join(self.matrix_flops)}"
            )
        return self.matrix_flops[dtype].value

    def of_ranks(self, count: int) -> Device:
        """What each of ``count`` ranks has: the device, or its part of a CPU that they share."""
        if self.cores is None or count == 1:
            return self

        def part(figure: Figure) -> Figure:
            return figure.model_copy(update={"value": figure.value / count})

        rates = {dtype: part(rate) for dtype, rate in self.matrix_flops.items()}
        shared = {"vector_flops": part(self.vector_flops), "memory_bandwidth": part(self.memory_bandwidth)}
        return self.model_copy(update={"matrix_flops": rates, **shared})

    @property
    def device_target(self) -> str:
        """What MindSpore calls such devices; the efficiencies of Megatron-LM are those of a GPU."""
        return {"mindspore": "Ascend", "megatron": "GPU", "cpu": "CPU"}[self.software]

    @property
    def host_rate(self) -> float:
        """Bytes a second between the memory of the device and the host's.

        Raises:
            UserError: the device has no such figure.
        """
        if self.host_bandwidth is None:
            raise UserError(f"device {self.name}: has no host_bandwidth, which the copies of swap_config need")
        return self.host_bandwidth.value

    def link_for(self, span: int) -> int:
        """Number of the innermost link that joins the devices of a block of ``span`` ranks.

        Raises:
            UserError: no link joins so many.
        """
        for number, link in enumerate(self.links):
            if link.devices is None or span <= link.devices:
                return number
        raise UserError(
            f"device {self.name}: no link joins {span} devices; the widest, {self.links[-1].name}, joins "
            f"{self.links[-1].devices}. Describe one with devices: null"
        )


def read_device(name: str) -> Device:
    """Reads a described device by the name of a shipped one or by the path of a YAML.

    Raises:
        UserError: no such device or file, or a key that is missing, unknown or makes no sense.
    """
    shipped = shipped_devices()
    path = Path(name)
    if name in shipped:
        path = DEVICES / f"{name}{SUFFIX}"
    elif not path.is_file():
        near = nearest(name, shipped).partition("; valid")[0]
        raise UserError(f"--device {name}: neither a file nor one of the described devices {', '.join(shipped)}{near}")
    try:
        return Device.model_validate(read_mapping(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where + ': ' if where else ''}{plain_message(first)}") from None
