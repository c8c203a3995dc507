"""What is predicted of a run: its peak by MindSpore's dry run, its step, its kernels and its exchanges by the model of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindllm.config import RunConfig
from mindllm.dry_run.run import simulate
from mindllm.dry_run.simulations import Simulations
from mindllm.dry_run.workspace import attention_elements_of, peak_with_workspace
from mindllm.profiles.predicted import PredictedStep
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device, Link
from mindllm.timing.step import StepTime, step_time

Where = Literal["", " inside a node", " between nodes", " inside and between nodes"]
LARGE = 0.5  # of the highest bandwidth, above which the links of an exchange are judged


@dataclass(frozen=True)
class Peak:
    """Bytes of the first stage at its fullest moment, without fragments; ``with_workspace``: with an estimate of kernels' own."""

    used: int
    with_workspace: int


@dataclass(frozen=True)
class Timed:
    """The predicted step of a run; ``node``: devices of each of several nodes, 0: there is one."""

    step: StepTime
    parts: PredictedStep
    node: int = 0

    def where(self, axis: str) -> Where:
        """Return which links the exchanges over an axis cross, as the end of their name."""
        group = self.parts.timed.groups[axis]
        inside = group.inside(self.node)
        if not self.node:
            return ""
        if inside == group.size:
            return " inside a node"
        return " between nodes" if inside == 1 else " inside and between nodes"

    @property
    def error(self) -> float | None:
        """Share of the step that is its stated range; None: none is stated."""
        known = self.step.device.step_error
        return known.value if known else None

    def bandwidths(self) -> dict[tuple[str, str], float]:
        """Return bytes a second that a rank sends in exchanges of each kind and axis, on the first stage that has some.

        Small messages, which tell of latency and not of links, are left out where there are larger ones over the same links.
        """
        found: dict[tuple[str, str], float] = {}
        for key, spent in self.parts.exchanges.items():
            for stage in range(self.parts.stages):
                seconds = spent.of_stage(stage, self.parts.runs)
                if seconds > 0 and key not in found:
                    found[key] = float(spent.bytes[stage]) / seconds
        most: dict[Where, float] = {}
        for (_, axis), rate in found.items():
            most[self.where(axis)] = max(rate, most.get(self.where(axis), 0.0))
        return {(op, axis): rate for (op, axis), rate in found.items() if rate >= LARGE * most[self.where(axis)]}


def peak_of(config: RunConfig, simulations: Simulations) -> Peak:
    """Dry-run the first stage of a run as it is.

    Raises:
        UserError, RunFailed: as :func:`mindllm.dry_run.run.simulate`.
    """
    (memory,) = simulate(config, simulations, [0], full=True).stages
    return Peak(memory.used_peak, peak_with_workspace(memory.moments, attention_elements_of(config)))


def timed(config: RunConfig, device: Device, node: int = 0) -> Timed:
    """Predict the step of a run on a described device; ``node``: devices of each of several nodes, 0: there is one.

    Raises:
        UserError: the device lacks a figure that the run needs.
    """
    step = step_time(workload_of(config), device)
    return Timed(step, PredictedStep(step), node)


def of_part_nodes(device: Device, used: int, there: int = 0) -> Device:
    """Return a device whose links join the ``used`` devices of each node alone.

    A description counts all devices of a node: ``there``, or where that is not known what its innermost link joins.
    """
    node = max(used, there or device.links[0].devices or used)
    links: list[Link] = []
    for link in device.links:
        reach = link.devices
        if reach is not None:
            reach = min(reach, used) if reach <= node else reach // node * used
        if reach is None or reach > max([1, *(one.devices or 0 for one in links)]):
            links.append(link.model_copy(update={"devices": reach}))
    return device.model_copy(update={"links": tuple(links)})
