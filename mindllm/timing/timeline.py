"""A predicted step as a trace that Perfetto and chrome://tracing open: passes of every stage, its exchanges, its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.files import atomic_open
from mindllm.schedules.operations import FORWARD, NAMES
from mindllm.timing.memory import kept_bytes
from mindllm.timing.step import StepTime
from mindllm.units import MIB, MICROSECONDS

COMPUTE, EXCHANGES = 0, 1


def write_timeline(step: StepTime, path: Path) -> None:
    """Writes the trace; of a step whose micro-batches repeat, those that are simulated."""
    with atomic_open(path) as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": list(events(step))}, file)


def events(step: StepTime) -> Iterator[dict[str, Any]]:
    """Trace events: a process for each stage, a thread for each of its streams, a counter of kept activations."""
    table, plan = step.line.table, step.workload.plan
    for stage in range(plan.stages):
        yield {"ph": "M", "pid": stage, "name": "process_name", "args": {"name": f"stage {stage}"}}
        for thread, name in ((COMPUTE, "compute"), (EXCHANGES, "exchanges")):
            yield {"ph": "M", "pid": stage, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for index in range(table.size):
        what, place, micro = (int(part[index]) for part in (table.what, table.place, table.micro))
        start, spent = float(step.line.start[index]), float(step.line.end[index] - step.line.start[index])
        one = (step.forward if what == FORWARD else step.backward)[place]
        label = f"{NAMES[what]} {micro}" + (f", chunk {place // plan.stages}" if plan.chunks > 1 else "")
        exchanged = sum(one.exchanged.values())
        args = {name: f"{1e3 * seconds:.3f} ms" for name, seconds in (*one.compute.items(), *one.exchanged.items())}
        yield _slice(place % plan.stages, COMPUTE, label, start, spent, args)
        if exchanged:
            yield _slice(place % plan.stages, EXCHANGES, f"within {label}", start, exchanged, args)
    yield from _ends(step)
    yield from _memory(step)


def _ends(step: StepTime) -> Iterator[dict[str, Any]]:
    start = float(step.line.end.max())
    for stage, end in enumerate(step.ends):
        yield _slice(stage, EXCHANGES, "gradients and weights", start, end.exposed, {})
        yield _slice(stage, COMPUTE, "update", start + end.exposed, end.update, {})


def _memory(step: StepTime) -> Iterator[dict[str, Any]]:
    """What micro-batches keep on every stage, by formula."""
    plan, kept = step.workload.plan, kept_bytes(step.workload)
    for stage in range(plan.stages):
        sizes = np.array([
            sum(size for layer, size in zip(plan.layers, kept, strict=True) if (layer.stage, layer.chunk) == (stage, chunk))
            for chunk in range(plan.chunks)
        ])  # fmt: skip
        for moment, held in zip(*step.line.memory_curve(stage, sizes / MIB), strict=True):
            yield {
                "ph": "C", "pid": stage, "name": "kept activations MiB", "ts": MICROSECONDS * float(moment),
                "args": {"MiB": round(float(held), 1)},
            }  # fmt: skip


def _slice(stage: int, thread: int, name: str, start: float, spent: float, args: dict[str, str]) -> dict[str, Any]:
    times = {"ts": MICROSECONDS * start, "dur": MICROSECONDS * spent}
    return {"ph": "X", "pid": stage, "tid": thread, "name": name, **times, "args": args}
