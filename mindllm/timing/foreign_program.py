"""The step time of anybody's program, from the compiled graphs that ``mindllm offline`` kept of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mindllm.compiled.foreign.kept_program import kept_stages
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED
from mindllm.errors import UserError
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
        device: what it is predicted for.
        stages: their passes, in milliseconds.
        line: all passes in the order of 1F1B.
    """

    schema: ClassVar[int] = 2  # before there was a version, times of stages were milliseconds
    device: Device
    stages: tuple[StageGraph, ...]
    line: Timeline

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.stages[0].micro_batches

    @property
    def seconds(self) -> float:
        """All passes, what the busiest stage does once per step, and what a device needs beside."""
        once = max(stage.once for stage in self.stages)
        return (self.line.makespan + once) / MILLISECONDS + self.device.step_overhead.value

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Operators of which only the bytes take time."""
        return tuple(sorted({name for stage in self.stages for name in stage.uncounted}))

    def summary(self) -> str:
        """Return stages and seconds."""
        return f"{len(self.stages)} stages, {self.seconds:.3f} s a step"

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints; all times are seconds."""
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
                for stage, waits in zip(self.stages, self.line.bubble(), strict=True)
            ],
            "uncounted": list(self.uncounted),
        }

    def parts(self) -> Iterator[Part]:
        """Yield the step, its stages, and what the figures rest on."""
        yield f"{self.device.name}, {len(self.stages)} stages: {self.seconds:.3f} s a step"
        yield self._stages()
        if self.uncounted:
            yield f"only the bytes take time of {', '.join(self.uncounted)}: their operations are not known"
        yield "operators: of the compiled graphs; passes follow each other as 1F1B has them"

    def _stages(self) -> Table:
        """A line for each stage: what a micro-batch takes, what is done once per step, and the share it waits."""
        columns = figures(
            "stage", "layers", f"{FORWARD} s", f"{RECOMPUTED} s", f"{BACKWARD} s", "once per step s", "waits"
        )
        rows = []
        for number, (stage, waits) in enumerate(zip(self.stages, self.line.bubble(), strict=True)):
            spent = (f"{time / MILLISECONDS:.5f}" for time in _times(stage).values())
            rows.append([str(number), str(len(stage.layers)), *spent, f"{100 * waits:.1f}%"])
        return Table(f"one of {self.micro_batches} micro-batches", columns, rows)


def _times(stage: StageGraph) -> dict[str, float]:
    """Milliseconds of a stage: of the passes of a micro-batch, and once per step."""
    return {**{phase: stage.passes[phase] for phase in (FORWARD, RECOMPUTED, BACKWARD)}, "once": stage.once}


def program_step(directory: Path, device: Device) -> ProgramStep:
    """Times the stages kept in a directory.

    Raises:
        UserError: ranks are missing, the pipeline is interleaved, or the device lacks a figure.
    """
    stages = tuple(stage_graphs([rank.graph for rank in kept_stages(directory)], device))
    if chunks := next((stage.chunks for stage in stages if stage.chunks > 1), None):
        raise UserError(
            f"{directory}: its pipeline is interleaved ({chunks} chunks), where the operators of a graph do not say which "
            "chunk they are of; simulate it with pp_interleave_num 1"
        )
    micro_batches = max(stage.micro_batches for stage in stages)
    forward, backward = (np.array([getattr(stage, name) for stage in stages]) for name in ("forward", "backward"))
    delay = max(stage.sent for stage in stages)
    if is_long(len(stages), micro_batches):
        line = simulate_long(micro_batches, forward, backward, delay)
    else:
        line = simulate(
            timetable(stage_orders("1f1b", len(stages), 1, micro_batches), 1), forward, backward, delay=delay
        )
    return ProgramStep(device, stages, line)
