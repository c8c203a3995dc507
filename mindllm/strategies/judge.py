"""A candidate's step and memory: first with the fewest recomputed layers that fit, then as the planner would place layers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from mindllm.architecture.layer_counts import places_in_order
from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerAssignment, LayerPlan
from mindllm.planning.costs.formula import ROOM
from mindllm.reduced_runs.even import even_counts
from mindllm.strategies.candidates import Candidate, read_candidate
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.timing.device import Device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import step_time
from mindllm.timing.workload import Workload

Figure = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
FIGURES = TypeAdapter(tuple[Figure, tuple[Figure, ...]])
"""Speed of a candidate, and memory of its stages."""


@dataclass(frozen=True)
class Judged:
    """A candidate that fits: tokens a second and device, and bytes of every stage, by formula."""

    candidate: Candidate
    speed: float
    memory: tuple[float, ...]

    def tree(self) -> dict[str, Any]:
        return {
            "candidate": self.candidate.tree(),
            "tokens_per_second_per_device": self.speed,
            "memory": list(self.memory),
        }


def read_judged(tree: dict[str, Any]) -> Judged:
    """Return the inverse of :meth:`Judged.tree`; raise ValueError, KeyError or TypeError for any other value."""
    candidate = read_candidate(tree["candidate"])
    speed, memory = FIGURES.validate_python((tree["tokens_per_second_per_device"], tree["memory"]))
    if len(memory) != candidate.pipeline_stage:
        raise ValueError(f"memory of {len(memory)} stages (value {candidate.pipeline_stage})")
    return Judged(candidate, speed, memory)


def judge(
    config: RunConfig,
    base: Workload,
    candidate: Candidate,
    device: Device,
    limit: float,
    constraints: Constraints = UNLIMITED,
) -> Judged | None:
    """Predicts a candidate of a run, whose own workload is ``base``; None where no recomputation makes it fit."""
    again = constraints.strongest
    counts = even_counts(config.model.config.layer_count, candidate.pipeline_stage, candidate.chunks)
    kept, full = (
        replace(base, strategy=candidate.strategy(config), plan=_plan(counts, layers, again, candidate.v_shape))
        for layers in (Counter[int](), Counter(dict.fromkeys(range(candidate.pipeline_stage), 1 << 20)))
    )
    fitted = _fitted(kept, stage_bytes(kept), stage_bytes(full), ROOM * limit)
    if fitted is None:
        return None
    workload = replace(kept, plan=_plan(counts, fitted, again, candidate.v_shape))
    memory = stage_bytes(workload)
    return Judged(candidate, step_time(workload, device).tokens_per_device, memory) if max(memory) <= limit else None


def _plan(counts: tuple[tuple[int, ...], ...], recomputed: Counter[int], again: LayerKind, v_shape: bool) -> LayerPlan:
    """The first layers of each stage recomputed as ``again`` says, so many as ``recomputed`` says."""
    seen, layers = Counter[int](), []
    for chunk, stage in places_in_order(len(counts[0]), len(counts), v_shape):
        for _ in range(counts[chunk][stage]):
            kind = again if seen[stage] < recomputed[stage] else LayerKind()
            layers.append(LayerAssignment.of_kind(kind, stage, chunk))
            seen[stage] += 1
    return LayerPlan(len(counts[0]), len(counts), tuple(layers), v_shape)


def _fitted(workload: Workload, kept: tuple[float, ...], full: tuple[float, ...], limit: float) -> Counter[int] | None:
    """How many layers each stage recomputes to fit; None where all of them are not enough."""
    found = Counter[int]()
    for stage, (most, least) in enumerate(zip(kept, full, strict=True)):
        if least > limit:
            return None
        layers = sum(layer.stage == stage for layer in workload.plan.layers)
        if most > limit:
            found[stage] = min(layers, math.ceil((most - limit) / max(1.0, most - least) * layers) + 1)
    return found
