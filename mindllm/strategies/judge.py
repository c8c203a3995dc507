"""Estimate the step and memory of a candidate with the fewest recomputed layers that fit."""

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
from mindllm.reduced_runs.even import even_counts
from mindllm.strategies.candidates import Candidate, read_candidate
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.timing.device import Device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import step_time
from mindllm.timing.verdict import usable_memory
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
    """Predict a candidate; None if no recomputation makes it fit.

    ``base`` is the workload of the run with the candidate's dispatch of experts.
    """
    again = constraints.strongest
    counts = even_counts(config.model.config.layer_count, candidate.pipeline_stage, candidate.chunks)

    def recomputing(layers: Counter[int]) -> Workload:
        plan = _plan(counts, layers, again, candidate.v_shape)
        return replace(base, strategy=candidate.strategy(config), plan=plan)

    usable = usable_memory(limit)
    # most candidates of a large model do not fit however much they recompute: that is checked first
    full = stage_bytes(recomputing(Counter(dict.fromkeys(range(candidate.pipeline_stage), 1 << 20))))
    if max(full) > usable:
        return None
    workload = recomputing(Counter())
    memory = stage_bytes(workload)
    if layers := _layers_to_recompute(workload, memory, full, usable):
        workload = recomputing(layers)
        memory = stage_bytes(workload)
    return Judged(candidate, step_time(workload, device).tokens_per_device, memory) if max(memory) <= usable else None


def _plan(counts: tuple[tuple[int, ...], ...], recomputed: Counter[int], again: LayerKind, v_shape: bool) -> LayerPlan:
    """Return the plan that recomputes the first ``recomputed`` layers of each stage as ``again``."""
    placed, layers = Counter[int](), []
    for chunk, stage in places_in_order(len(counts[0]), len(counts), v_shape):
        for _ in range(counts[chunk][stage]):
            kind = again if placed[stage] < recomputed[stage] else LayerKind()
            layers.append(LayerAssignment.of_kind(kind, stage, chunk))
            placed[stage] += 1
    return LayerPlan(len(counts[0]), len(counts), tuple(layers), v_shape)


def _layers_to_recompute(
    workload: Workload, bytes_kept: tuple[float, ...], full: tuple[float, ...], limit: float
) -> Counter[int]:
    """Return the number of layers that each stage recomputes to fit.

    ``bytes_kept`` and ``full`` are the bytes of each stage with no and with all layers recomputed.
    """
    counts = Counter[int]()
    for stage, (most, least) in enumerate(zip(bytes_kept, full, strict=True)):
        layers = sum(layer.stage == stage for layer in workload.plan.layers)
        if most > limit:
            counts[stage] = min(layers, math.ceil((most - limit) / max(1.0, most - least) * layers) + 1)
    return counts
