"""Predict the step time of a program from the compiled graphs that ``mindllm offline`` kept of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED
from mindllm.errors import UserError
from mindllm.programs.kept import kept_stages
from mindllm.results import Result
from mindllm.schedules.orders import stage_orders, timetable
from mindllm.schedules.simulate import Timeline, simulate
from mindllm.schedules.steady import is_long, simulate_long
from mindllm.terminal.tables import Table, figures
from mindllm.timing.device import Device
from mindllm.timing.stage_graph import StageGraph, stage_graphs
from mindllm.units import MILLISECONDS

if TYPE_CHECKING:
    from mindllm.results import Part


@dataclass(frozen=True, repr=False)
class ProgramStep(Result):
    """A predicted step of a program.

    Attributes:
        device: the described device.
        stages: passes of each stage, in milliseconds.
        timeline: all passes in the order of 1F1B.
    """

    schema: ClassVar[int] = 2  # before there was a version, times of stages were milliseconds
    device: Device
    stages: tuple[StageGraph, ...]
    timeline: Timeline

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.stages[0].micro_batches

    @property
    def seconds(self) -> float:
        """Seconds of all passes, the busiest stage's work once per step, and the overhead of the device."""
        once = max(stage.once for stage in self.stages)
        return (self.timeline.makespan + once) / MILLISECONDS + self.device.step_overhead.value

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Operators whose time is counted by bytes alone."""
        return tuple(sorted({name for stage in self.stages for name in stage.uncounted}))

    def summary(self) -> str:
        """Return the number of stages and the seconds of a step."""
        return f"{len(self.stages)} stages, {self.seconds:.3f} s a step"

    def tree(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; all times are seconds."""
        return {
            "device": self.device.name,
            "seconds": self.seconds,
            "micro_batches": self.micro_batches,
            "operators": "compiled graphs",
            "stages": [
                {
                    **{name: spent / MILLISECONDS for name, spent in _times(stage).items()},
                    "sent": stage.sent / MILLISECONDS,
                    "layers": len(stage.layers),
                    "waits": float(waits),
                }
                for stage, waits in zip(self.stages, self.timeline.bubble(), strict=True)
            ],
            "uncounted": list(self.uncounted),
        }

    def parts(self) -> Iterator[Part]:
        """Yield the step, its stages, and the basis of the figures."""
        yield f"{self.device.name}, {len(self.stages)} stages: {self.seconds:.3f} s a step"
        yield self._stages()
        if self.uncounted:
            yield f"counted by bytes alone, for lack of a formula of their operations: {', '.join(self.uncounted)}"
        yield "operators: from the compiled graphs; passes in the order of 1F1B"

    def _stages(self) -> Table:
        """Return a row for each stage: seconds of a micro-batch and once per step, and the share of waiting."""
        columns = figures(
            "stage", "layers", f"{FORWARD} s", f"{RECOMPUTED} s", f"{BACKWARD} s", "once per step s", "waits"
        )
        rows = []
        for number, (stage, waits) in enumerate(zip(self.stages, self.timeline.bubble(), strict=True)):
            spent = (f"{time / MILLISECONDS:.5f}" for time in _times(stage).values())
            rows.append([str(number), str(len(stage.layers)), *spent, f"{100 * waits:.1f}%"])
        return Table(f"one of {self.micro_batches} micro-batches", columns, rows)


def _times(stage: StageGraph) -> dict[str, float]:
    """Return the milliseconds of a stage: of each pass of a micro-batch, and once per step."""
    return {**{phase: stage.passes[phase] for phase in (FORWARD, RECOMPUTED, BACKWARD)}, "once": stage.once}


def predict_step(directory: Path, device: Device) -> ProgramStep:
    """Predict a step from the stages in a directory.

    Raises:
        UserError: ranks are missing, the pipeline is interleaved, or the device lacks a figure.
    """
    stages = tuple(stage_graphs([rank.graph for rank in kept_stages(directory)], device))
    if chunks := next((stage.chunks for stage in stages if stage.chunks > 1), None):
        raise UserError(
            f"{directory}: its pipeline is interleaved ({chunks} chunks), and the operators of its graphs do not name their "
            "chunk; simulate it with pp_interleave_num 1"
        )
    micro_batches = max(stage.micro_batches for stage in stages)
    forward, backward = (np.array([getattr(stage, name) for stage in stages]) for name in ("forward", "backward"))
    delay = max(stage.sent for stage in stages)
    if is_long(len(stages), micro_batches):
        timeline = simulate_long(micro_batches, forward, backward, delay)
    else:
        timeline = simulate(
            timetable(stage_orders("1f1b", len(stages), 1, micro_batches), 1), forward, backward, delay=delay
        )
    return ProgramStep(device, stages, timeline)
