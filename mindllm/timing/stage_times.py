"""Where the time of a step goes, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindllm.terminal.tables import Table, figures
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import StepTime
from mindllm.timing.verdict import Room, implausible
from mindllm.units import GIB


@dataclass(frozen=True)
class StageTime:
    """Seconds of a step on one stage; what its parts leave of the step is ``bubble``.

    Attributes:
        compute: by class of operator.
        exchanged: tensor-parallel exchanges by kind, all of which the stage waits for.
        sends: waiting for sends and receives, where they block.
        replicas: exchanges between replicas that nothing hides.
    """

    stage: int
    layers: int
    compute: dict[str, float]
    exchanged: dict[str, float]
    sends: float
    replicas: float
    update: float
    bubble: float
    memory: float


def stage_times(step: StepTime) -> list[StageTime]:
    """The stages of a predicted step."""
    plan, strategy = step.workload.plan, step.workload.strategy
    runs = strategy.runs
    busy = step.line.busy() * strategy.accumulation
    found = []
    for stage, memory in enumerate(stage_bytes(step.workload)):
        passes = [*step.forward[stage :: plan.stages], *step.backward[stage :: plan.stages]]
        compute: dict[str, float] = {}
        exchanged: dict[str, float] = {}
        for one in passes:
            for total, part in ((compute, one.compute), (exchanged, one.exchanged)):
                for name, seconds in part.items():
                    total[name] = total.get(name, 0.0) + seconds * runs
        end = step.ends[stage]
        own = float(busy[stage])
        sends = own - sum(compute.values()) - sum(exchanged.values())
        bubble = step.seconds - own - end.seconds
        layers = sum(layer.stage == stage for layer in plan.layers)
        found.append(
            StageTime(stage, layers, compute, exchanged, max(0.0, sends), end.exposed, end.update, bubble, memory)
        )
    return found


def mean_stage(step: StepTime) -> dict[str, float]:
    """Seconds of a step by what they are spent on, the mean of all stages."""
    found: dict[str, float] = {}
    stages = stage_times(step)
    for one in stages:
        once = {"sends": one.sends, "replicas": one.replicas, "update": one.update, "bubble and rest": one.bubble}
        for name, seconds in (*one.compute.items(), *one.exchanged.items(), *once.items()):
            found[name] = found.get(name, 0.0) + seconds / len(stages)
    return found


def table(stages: Sequence[StageTime]) -> Table:
    """A line for each stage, in seconds of a step."""
    classes = list(dict.fromkeys(name for stage in stages for name in stage.compute))
    kinds = list(dict.fromkeys(name for stage in stages for name in stage.exchanged))
    columns = figures(
        "stage", "layers", *classes, *kinds, "sends", "replicas", "update", "bubble and rest", "memory GB ≈"
    )
    rows = []
    for one in stages:
        spent = [*(one.compute.get(name, 0.0) for name in classes), *(one.exchanged.get(name, 0.0) for name in kinds)]
        spent += [one.sends, one.replicas, one.update, one.bubble]
        cells = [f"{seconds:,.4f}" for seconds in spent]
        rows.append([str(one.stage), str(one.layers), *cells, f"{one.memory / GIB:.1f}"])
    return Table("seconds of a step", columns, rows)


def report(step: StepTime, stages: Sequence[StageTime], changes: dict[str, float], memory: Room) -> dict[str, Any]:
    """The same as a tree for ``--json``; seconds and bytes."""
    return {
        "device": step.device.name,
        "seconds": step.seconds,
        "tokens_per_second_per_device": step.tokens_per_device,
        "model_flops_utilisation": step.utilisation,
        "implausible": implausible(step.utilisation),
        **memory.tree(),
        "operators": "architecture",
        "not_counted": list(step.uncounted),
        "stages": [vars(stage) for stage in stages],
        "changes": changes,
    }
