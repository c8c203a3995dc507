"""The step time of anybody's program, from the compiled graphs that ``mindllm offline`` kept of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.compiled.foreign.kept_program import kept_stages
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED
from mindllm.errors import UserError
from mindllm.schedules.orders import stage_orders, timetable
from mindllm.schedules.simulate import Timeline, simulate
from mindllm.schedules.steady import is_long, simulate_long
from mindllm.terminal.tables import Table, figures
from mindllm.timing.device import Device
from mindllm.timing.stage_graph import StageGraph, stage_graphs
from mindllm.units import MILLISECONDS


@dataclass(frozen=True)
class ProgramStep:
    """A step of a program: its stages in milliseconds, and their passes in the order of 1F1B."""

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


def table(step: ProgramStep) -> Table:
    """A line for each stage: milliseconds of a micro-batch, of what is done once per step, and the share it waits."""
    columns = figures("stage", "layers", FORWARD, RECOMPUTED, BACKWARD, "once per step", "waits")
    rows = []
    for number, (stage, waits) in enumerate(zip(step.stages, step.line.bubble(), strict=True)):
        spent = [*(stage.passes[phase] for phase in (FORWARD, RECOMPUTED, BACKWARD)), stage.once]
        rows.append([str(number), str(len(stage.layers)), *(f"{time:,.2f}" for time in spent), f"{100 * waits:.1f}%"])
    return Table(f"milliseconds of one of {step.micro_batches} micro-batches", columns, rows)


def report(step: ProgramStep) -> dict[str, Any]:
    """The same as a tree for ``--json``; milliseconds of a stage, seconds of the step."""
    return {
        "device": step.device.name,
        "seconds": step.seconds,
        "micro_batches": step.micro_batches,
        "operators": "compiled graphs",
        "stages": [
            {**stage.passes, "once": stage.once, "sent": stage.sent, "layers": len(stage.layers), "waits": float(waits)}
            for stage, waits in zip(step.stages, step.line.bubble(), strict=True)
        ],
        "uncounted": list(step.uncounted),
    }
