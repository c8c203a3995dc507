"""What is predicted of a run: its peak by MindSpore's dry run, its step, its kernels and its exchanges by the model of time."""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.config import RunConfig
from mindllm.dry_run.run import simulate
from mindllm.dry_run.simulations import Simulations
from mindllm.dry_run.workspace import attention_elements_of, peak_with_workspace
from mindllm.profiles.predicted import PredictedStep
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device
from mindllm.timing.step import StepTime, step_time

LARGE = 0.5  # of the highest bandwidth, above which the links of an exchange are judged


@dataclass(frozen=True)
class Peak:
    """Bytes of the first stage at its fullest moment, without fragments; ``with_workspace``: with an estimate of kernels' own."""

    used: int
    with_workspace: int
    estimated: bool


@dataclass(frozen=True)
class Timed:
    """The predicted step of a run."""

    step: StepTime
    parts: PredictedStep

    @property
    def error(self) -> float | None:
        """Share of the step that is its stated range; None: none is stated."""
        known = self.step.device.step_error
        return known.value if known else None

    def bandwidths(self) -> dict[tuple[str, str], float]:
        """Return bytes a second that a rank sends in exchanges of each kind and axis, on the first stage that has some.

        Small messages, which tell of latency and not of links, are left out where there are larger ones.
        """
        found: dict[tuple[str, str], float] = {}
        for key, spent in self.parts.exchanges.items():
            for stage in range(self.parts.stages):
                seconds = spent.of_stage(stage, self.parts.runs)
                if seconds > 0 and key not in found:
                    found[key] = float(spent.bytes[stage]) / seconds
        return {key: rate for key, rate in found.items() if rate >= LARGE * max(found.values())}


def peak_of(config: RunConfig, simulations: Simulations) -> Peak:
    """Dry-run the first stage of a run as it is.

    Raises:
        UserError, RunFailed: as :func:`mindllm.dry_run.run.simulate`.
    """
    (memory,) = simulate(config, simulations, [0], full=True).stages
    return Peak(memory.used_peak, peak_with_workspace(memory.moments, attention_elements_of(config)), memory.estimated)


def timed(config: RunConfig, device: Device) -> Timed:
    """Predict the step of a run on a described device.

    Raises:
        UserError: the device lacks a figure that the run needs.
    """
    step = step_time(workload_of(config), device)
    return Timed(step, PredictedStep(step))
