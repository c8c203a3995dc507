"""Memory of layers and stages from small runs, by one least squares over all of them.

    M = layers · parameter + alive · (layers · activation_kind + exchanged_place) + constant_place,kind

``alive`` are micro-batches kept, ``exchanged`` what a stage keeps of each beside its layers (what it receives, the embedding).
``constant`` is what a stage needs whatever it holds, and the working memory of the fullest moment: in the backward pass of its
last layer, or, in the last stage, of the loss, which no kind changes; its layers' own moment is looked up there, too. How much
of the former is working memory of the lightest kind cannot be told and does not matter: ``transient`` is what a kind needs
beyond that.

When a step starts, a stage may need more than ever after if it keeps little: weights are cast and gathered, and there are no
activations. That is layers · (parameter + start) + a constant, whatever is recomputed. The first stage keeps more later on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindllm.config import ParallelConfig
from mindllm.planning.schedules.orders import alive, stage_orders
from toolkit.dry_run.stages import FIRST, LAST, MIDDLE
from toolkit.pipeline_balance.small_runs import AT_START, FULL, LAST_LAYERS, Measured, SmallRuns

Unknown = tuple[str, str, str]  # what, of which place, of which kind


@dataclass(frozen=True)
class MemoryFit:
    """Memory in MB.

    Attributes:
        parameter: of a layer: parameters, gradients, optimizer state.
        start: of a layer beyond that, when a step starts.
        started: beside layers when a step starts, by place.
        activation: kept of a layer and micro-batch, by recompute kind.
        transient: working memory beyond that of the lightest kind, by recompute kind.
        tail: working memory of the loss beyond that of the lightest kind.
        exchanged: kept of a micro-batch beside layers, by place.
        fixed: all that is left, by place.
        residuals: every small run, and what it needs beyond the fit.
        runs: the small runs.
    """

    parameter: float
    start: float
    started: Mapping[str, float]
    activation: Mapping[str, float]
    transient: Mapping[str, float]
    tail: float
    exchanged: Mapping[str, float]
    fixed: Mapping[str, float]
    residuals: tuple[tuple[Measured, float], ...]
    runs: SmallRuns

    def static(self, sizes: ParallelConfig, chunks: int) -> tuple[float, ...]:
        """What every stage of ``chunks`` chunks needs beside its layers, ``[stages]``."""
        orders = stage_orders("1f1b", sizes.pipeline_stage, chunks, sizes.micro_batch_num)
        found = []
        for stage, vectors in enumerate(alive(orders, chunks)):
            place = _place(stage, sizes.pipeline_stage)
            kept = int(vectors.sum(axis=1).max())
            if place == LAST:  # the one micro-batch that a small run keeps is in ``fixed``
                found.append(self.fixed[place] + (kept - 1) * self.exchanged.get(MIDDLE, 0.0))
            else:
                found.append(self.fixed[place] + kept * self.exchanged.get(place, 0.0))
        return tuple(max(0.0, size) for size in found)

    def at_start(self, stages: int) -> tuple[float, ...]:
        """What every stage needs beside its layers when a step starts, ``[stages]``."""
        return tuple(self.started.get(_place(stage, stages), 0.0) for stage in range(stages))


def _place(stage: int, stages: int) -> str:
    return FIRST if stage == 0 else LAST if stage == stages - 1 else MIDDLE


def fit_memory(runs: SmallRuns) -> MemoryFit:
    """Shares out the memory of small runs; the kinds of the first one's place are all that there are."""
    rows = runs.measured
    values, left = _solved(rows)
    kinds = list(dict.fromkeys(row.kind for row in rows))
    constant = {(place, kind): value for (what, place, kind), value in values.items() if what == "constant"}
    inner = rows[0].place
    lightest = min(constant[inner, kind] for kind in kinds)
    transient = {kind: constant[inner, kind] - lightest for kind in kinds}
    places = dict.fromkeys(place for place, _ in constant)
    beside = {place: [constant[p, k] - transient[k] for p, k in constant if p == place] for place in places}
    fixed = {place: max(found) for place, found in beside.items() if place in (FIRST, MIDDLE)}
    fixed[LAST] = min([*beside[LAST], max(beside.get(LAST_LAYERS, beside[LAST]))])
    return MemoryFit(
        parameter=max(0.0, values["parameter", "", ""]),
        start=max(0.0, values["start", "", ""]),
        started={place: max(0.0, constant[name, FULL]) for place, name in AT_START.items() if name in places},
        activation={kind: max(0.0, values["activation", "", kind]) for kind in kinds},
        transient=transient,
        tail=max(0.0, min(constant[place, kind] for place, kind in constant if place == LAST) - fixed[LAST]),
        exchanged={place: value for (what, place, _), value in values.items() if what == "exchanged"},
        fixed=fixed,
        residuals=tuple(zip(rows, left, strict=True)),
        runs=runs,
    )


def _solved(rows: tuple[Measured, ...]) -> tuple[dict[Unknown, float], list[float]]:
    """The unknowns by least squares of relative errors, and what is left of every row, in MB."""
    deep = {place for place in (FIRST, MIDDLE) if len({row.alive for row in rows if row.place == place}) > 1}
    unknowns = dict.fromkeys(unknown for row in rows for unknown in _factors(row, deep))
    matrix = np.array([[_factors(row, deep).get(unknown, 0) for unknown in unknowns] for row in rows], float)
    memory = np.array([row.memory_mb for row in rows])
    weighted, scale = matrix / memory[:, None], np.abs(matrix).max(axis=0) / memory.max()
    solved = np.linalg.lstsq(weighted / scale, np.ones(len(rows)), rcond=None)[0] / scale
    return dict(zip(unknowns, solved.tolist(), strict=True)), (memory - matrix @ solved).tolist()


def _factors(row: Measured, deep: set[str]) -> dict[Unknown, int]:
    """How often a small run has each unknown."""
    if row.place in AT_START.values():
        return {("parameter", "", ""): row.layers, ("start", "", ""): row.layers, ("constant", row.place, row.kind): 1}
    found = {
        ("parameter", "", ""): row.layers,
        ("activation", "", row.kind): row.layers * row.alive,
        ("constant", row.place, row.kind): 1,
    }
    return found | ({("exchanged", row.place, ""): row.alive} if row.place in deep else {})
