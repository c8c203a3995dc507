"""What one change would bring: the step predicted again with faster links, without recomputation, in perfect balance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindllm.config.checks.sequence import MOST, can_be_cut
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.schedules.simulate import simulate
from mindllm.timing.device import Device
from mindllm.timing.step import StepTime, step_time
from mindllm.timing.workload import Workload

FASTER = 2.0


def changes(step: StepTime) -> dict[str, float]:
    """Seconds of the step with each change alone, by what is changed."""
    workload, device = step.workload, step.device
    found = {
        f"{link.name} {FASTER:g} times as fast": step_time(workload, faster(device, number)).seconds
        for number, link in enumerate(device.links)
    }
    found |= {name: step_time(other, device).seconds for name, other in interleaved(workload).items()}
    plan = workload.plan
    if any(layer.recompute or layer.patterns for layer in plan.layers):
        kept = replace(plan, layers=tuple(LayerAssignment(at.stage, at.chunk) for at in plan.layers))
        found["nothing recomputed (memory aside)"] = step_time(replace(workload, plan=kept), device).seconds
    if plan.stages > 1:
        found["stages in perfect balance"] = balanced(step)
        found["no bubble at all"] = step.seconds - schedule(step) + busiest(step)
    return found


def interleaved(workload: Workload) -> dict[str, Workload]:
    """The workload without the copies or parts that hide exchanges; where there are none, with each kind that it may have."""
    strategy = workload.strategy
    if strategy.copies > 1:
        return {"one copy (micro_batch_interleave_num 1)": replace(workload, strategy=replace(strategy, copies=1))}
    if strategy.row_parts > 1:
        name = "tokens at once (fine_grain_interleave 1)"
        return {name: replace(workload, strategy=replace(strategy, row_parts=1))}
    if strategy.model_parallel == 1:
        return {}
    found = {}
    if can_be_cut(workload.architecture) and not strategy.shares_sequences:
        parts = replace(strategy, row_parts=MOST)
        found[f"tokens in parts (fine_grain_interleave {MOST})"] = replace(workload, strategy=parts)
    if strategy.micro_batch_size % 2 == 0:
        copies = replace(strategy, copies=2)
        found["two copies (micro_batch_interleave_num 2)"] = replace(workload, strategy=copies)
    return found


def faster(device: Device, number: int) -> Device:
    """``device`` with one link of several times the bandwidth."""
    links = list(device.links)
    rate = links[number].bandwidth
    links[number] = links[number].model_copy(
        update={"bandwidth": rate.model_copy(update={"value": FASTER * rate.value})}
    )
    return device.model_copy(update={"links": tuple(links)})


def schedule(step: StepTime) -> float:
    """Seconds of all passes with their bubbles."""
    return step.line.makespan * step.workload.strategy.accumulation


def busiest(step: StepTime) -> float:
    """Seconds that the busiest stage computes."""
    return float(step.line.busy().max()) * step.workload.strategy.accumulation


def balanced(step: StepTime) -> float:
    """Seconds of the step if every place took the mean of all."""
    forward, backward = (
        np.full(len(part), np.mean([one.seconds for one in part])) for part in (step.forward, step.backward)
    )
    line = replace(simulate(step.line.table, forward, backward), repeated=step.line.repeated)
    if line.repeated:  # the steady state of equal stages repeats with every micro-batch
        line = replace(line, period=float(forward[0] + backward[0]) * step.workload.plan.chunks)
    return step.seconds - schedule(step) + line.makespan * step.workload.strategy.accumulation
