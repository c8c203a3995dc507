"""A run's step time with what must be said beside it: stages, memory, doubts, what one change would bring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled
from mindllm.timing.configured import mindformers_workload, workload_of
from mindllm.timing.costs.attention import in_one_kernel
from mindllm.timing.device import Device
from mindllm.timing.stage_times import StageTime, mean_stage, report, stage_times, table
from mindllm.timing.step import StepTime, step_time
from mindllm.timing.verdict import Room, implausible, limit_text, memory_limit
from mindllm.timing.what_if import changes
from mindllm.units import DEVICE_GB, counted

if TYPE_CHECKING:
    from mindllm.results import Part

IN_MINDFORMERS = "seconds_in_mindformers"
ADVICE = "mindllm search looks for a strategy that fits"


@dataclass(frozen=True, repr=False)
class StepPrediction(Result):
    """A predicted step; times are seconds, sizes are bytes.

    Attributes:
        step: the step with its passes and their schedule.
        stages: where its time goes on every stage.
        memory: the memory of every stage, by formula, beside the limit.
        changes: seconds of the step with one change alone, by what is changed; empty where nobody asked.
        in_mindformers: the step where MindFormers itself runs the YAML; None where it is none of MindFormers.
    """

    step: StepTime
    stages: tuple[StageTime, ...]
    memory: Room
    changes: Mapping[str, float]
    in_mindformers: StepTime | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.step.seconds

    @property
    def step_error(self) -> float | None:
        """Share of the step within which about nine of ten measured ones were; None where no measured step was at hand."""
        known = self.step.device.step_error
        return known.value if known else None

    @property
    def in_words(self) -> str:
        """Seconds of the step with their range, as ``30.370 s ± 13%``."""
        return f"{self.seconds:.3f} s" + (f" ± {self.step_error:.0%}" if self.step_error else "")

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens a second and device."""
        return self.step.tokens_per_device

    @property
    def model_flops_utilisation(self) -> float:
        """Model FLOPs utilisation, from 0 to 1."""
        return self.step.utilisation

    @property
    def fits(self) -> bool:
        """Whether every stage fits into memory, by formula."""
        return self.memory.fits

    @property
    def shortage(self) -> str:
        """What does not fit and what finds something that does; empty where all fit."""
        return "" if self.fits else f"{self.memory}, by formula; {ADVICE}"

    def write_timeline(self, path: Path | str) -> None:
        """Write a trace for Perfetto."""
        from mindllm.timing.timeline import write_timeline

        write_timeline(self.step, Path(path))

    def summary(self) -> str:
        """Return the step and the verdict on its memory."""
        return f"{self.seconds:.3f} s a step, {'fits' if self.fits else 'does not fit'}"

    def tree(self) -> dict[str, Any]:
        """Return seconds and bytes, as ``--json`` prints them."""
        found = report(self.step, self.stages, dict(self.changes), self.memory)
        known = {"step_error": self.step_error, "device_target": self.step.device.device_target}
        theirs = self.in_mindformers
        return {**found, **known, IN_MINDFORMERS: None if theirs is None else theirs.seconds}

    def parts(self) -> Iterator[Part]:
        """Yield the headline, what it would hide, the stages, the changes, and what the figures rest on."""
        yield headline(self.step)
        for doubt in self.doubts():
            yield styled((doubt, "bold red"))
        yield table(self.stages)
        if self.in_mindformers is not None:
            yield _in_mindformers(self.in_mindformers)
        if self.changes:
            yield self._changes()
        if self.step.uncounted:
            yield f"not counted: {'; '.join(self.step.uncounted)}"
        yield f"memory by formula, {DEVICE_GB}: {limit_text(self.memory.limit, self.memory.reserved)}"
        yield ("operators: from the architecture, not from a compiled graph; mindllm dry-run simulates the memory")

    def doubts(self) -> list[str]:
        """Return what the headline would hide: stages that do not fit, a utilisation that no run has."""
        found = [] if self.fits else [f"does not fit: it {self.shortage}"]
        if what := implausible(self.step.utilisation):
            part, seconds = max(mean_stage(self.step).items(), key=lambda item: item[1])
            share = f"{100 * seconds / self.seconds:.0f}% of it is {part}"
            found.append(f"implausible: {what}; do not trust the step before you know why ({share})")
        return found

    def _changes(self) -> Table:
        rows = [
            (name, f"{seconds:.3f}", f"{100 * (self.seconds / seconds - 1):+.1f}%")
            for name, seconds in self.changes.items()
        ]
        return Table("one change alone", [*texts("change"), *figures("step s", "speed")], rows)


def predict_step(config: RunConfig, device: Device) -> StepTime:
    """Return the step of a run: the one definition of a step time, which every command shows.

    Raises:
        UserError: the run has something that is not modelled, or the device lacks a figure that it needs.
    """
    return step_time(workload_of(config, device.software == "cpu"), device)


def predict(config: RunConfig, device: Device, explain: bool = False) -> StepPrediction:
    """Predict a step of a run; with ``explain`` also what one change alone would bring.

    Raises:
        UserError: the run has something that is not modelled, or the device lacks a figure that it needs.
    """
    step = predict_step(config, device)
    stages = tuple(stage_times(step))
    memory = Room(tuple(stage.memory for stage in stages), memory_limit(config, device))
    theirs = mindformers_workload(config)
    own = None if theirs is None else step_time(theirs, device)
    return StepPrediction(step, stages, memory, changes(step) if explain else {}, own)


def _in_mindformers(step: StepTime) -> str:
    """What MindFormers itself takes, and why it is another time."""
    numerics = step.workload.numerics
    reasons = ["attention reads a mask of every pair of tokens"] * numerics.reads_masks
    composed = not all(in_one_kernel(spec.attention, numerics) for spec in step.workload.architecture.specifications())
    reasons += ["mask, casts and softmax in one kernel"] * (composed and not numerics.plain_softmax)
    reasons += ["a kernel draws and applies dropout"] * step.workload.architecture.drops
    speed = f"{step.seconds:.3f} s a step, {step.tokens_per_device:,.0f} tokens/s/device"
    return f"in MindFormers itself: {speed}" + (f" ({', '.join(reasons)})" if reasons else "")


def headline(step: StepTime) -> str:
    """Return the step in a line."""
    strategy = step.workload.strategy
    return (
        f"{step.device.name}, {counted(strategy.device_num, 'device')}: {step.seconds:.3f} s a step, "
        f"{step.tokens_per_device:,.0f} tokens/s/device, {100 * step.utilisation:.1f}% model FLOPs utilisation"
    )
