"""Memory of layers and stages from small runs, by one least squares over all of them.

    M = layers · parameter + alive · (layers · activation_kind + exchanged_place) + constant_place,kind

``parameter``, ``activation`` and ``constant`` are those of the type of layers that the run has, where a model has several types.
``alive`` are micro-batches kept, ``exchanged`` what a stage keeps of each beside its layers (what it receives, the embedding).
``constant`` is what a stage needs whatever it holds, and the working memory of the fullest moment: in the backward pass of its
last layer, or, in the last stage, of the loss, which no kind changes; its layers' own moment is looked up there, too. How much
of the former is working memory of the lightest kind cannot be told and does not matter: ``transient`` is what a kind needs
beyond that. Tables and masks that layers of one type read are in the constants; what those of the others add is known from the
run with a layer of each type, and is taken to be on every stage. A layer that predicts ahead is in the constants of the
last stage but for what its recompute kinds differ in, which is an activation of its own.

When a step starts, a stage may need more than ever after if it keeps little: weights are cast and gathered, and there are no
activations. That is layers · (parameter + start) + a constant, whatever is recomputed. The first stage keeps more later on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.architecture.layer_counts import ZERO_BUBBLE_V
from mindllm.config import ParallelConfig
from mindllm.parallel.stages import FIRST, LAST, MIDDLE
from mindllm.planning.costs.small_runs import AT_START, LAST_LAYERS, NOTHING_RECOMPUTED, TOGETHER, Measured, SmallRuns
from mindllm.schedules.held_memory import working_memory
from mindllm.schedules.orders import alive, stage_orders

Unknown = tuple[str, str, str, str]  # what, of which place, of which type of layers, of which recompute kind
PARAMETER, START, ACTIVATION, EXCHANGED, CONSTANT = "parameter", "start", "activation", "exchanged", "constant"


@dataclass(frozen=True)
class LayerMemory:
    """Memory of a type of layers in MB.

    Attributes:
        parameter: parameters, gradients, optimizer state.
        start: beyond that, when a step starts.
        activation: kept of a micro-batch, by recompute kind.
        transient: working memory beyond that of the lightest kind of all types, by recompute kind.
    """

    parameter: float
    start: float
    activation: Mapping[str, float]
    transient: Mapping[str, float]


@dataclass(frozen=True)
class MemoryFit:
    """Memory in MB.

    Attributes:
        layers: by type.
        started: beside layers when a step starts, by place.
        tail: working memory of the loss beyond that of the lightest kind.
        exchanged: kept of a micro-batch beside layers, by place.
        fixed: all that is left, by place.
        residuals: every small run, and what it needs beyond the fit.
        runs: the small runs.
    """

    layers: Mapping[str, LayerMemory]
    started: Mapping[str, float]
    tail: float
    exchanged: Mapping[str, float]
    fixed: Mapping[str, float]
    residuals: tuple[tuple[Measured, float], ...]
    runs: SmallRuns

    def static(self, sizes: ParallelConfig, chunks: int, v_shape: bool = False) -> tuple[float, ...]:
        """What every stage of ``chunks`` chunks needs beside its layers, ``[stages]``."""
        if v_shape:
            return self._static_of_v(sizes)
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

    def _static_of_v(self, sizes: ParallelConfig) -> tuple[float, ...]:
        """In a V the first stage has embedding and head, the others are like a middle stage.

        In a pipeline of two stages none was seen, and the first one stands for it: that has the embedding, too. All stages were
        seen to hold what one more layer keeps.
        """
        stages = sizes.pipeline_stage
        inner = MIDDLE if MIDDLE in self.fixed else FIRST
        orders = stage_orders(ZERO_BUBBLE_V, stages, 2, sizes.micro_batch_num)
        kept = [int(vectors.sum(axis=1).max()) * self.exchanged.get(inner, 0.0) for vectors in alive(orders, 2)]
        more = max(kept for layer in self.layers.values() for kept in layer.activation.values())
        head = max(0.0, self.fixed[LAST] - (self.fixed[inner] if inner == MIDDLE else 0.0))
        fixed = [self.fixed[FIRST] + head, *[self.fixed[inner]] * (stages - 1)]
        return tuple(max(0.0, size + held + more) for size, held in zip(fixed, kept, strict=True))

    def at_start(self, stages: int, v_shape: bool = False) -> tuple[float, ...]:
        """What every stage needs beside its layers when a step starts, ``[stages]``; in a V the last stage has no head."""
        places = [_place(stage, stages) for stage in range(stages)]
        if v_shape:
            places[-1] = MIDDLE
        return tuple(self.started.get(place, 0.0) for place in places)


def _place(stage: int, stages: int) -> str:
    return FIRST if stage == 0 else LAST if stage == stages - 1 else MIDDLE


def fit_memory(runs: SmallRuns) -> MemoryFit:
    """Shares out the memory of small runs; the types and recompute kinds of the first one's place are all that there are."""
    rows = runs.measured
    values, left = _solved(rows)
    inner = rows[0].place
    constant = {key[1:]: value for key, value in values.items() if key[0] == CONSTANT}
    alone = {key: value for key, value in constant.items() if key[1] != TOGETHER}
    lightest = min(value for (place, *_), value in alone.items() if place == inner)
    layers = {name: _layer(name, inner, lightest, values) for name in dict.fromkeys(name for _, name, _ in alone)}
    beside: dict[str, list[float]] = {}
    for (place, name, kind), value in alone.items():
        beside.setdefault(place, []).append(value - layers[name].transient[kind])
    fixed = {place: max(found) for place, found in beside.items() if place in (FIRST, MIDDLE)}
    fixed[LAST] = min([*beside[LAST], max(beside.get(LAST_LAYERS, beside[LAST]))])
    tail = min(value for (place, *_), value in alone.items() if place == LAST) - fixed[LAST]
    more = _of_other_types(layers, constant.get((inner, TOGETHER, NOTHING_RECOMPUTED)), lightest)
    fixed[LAST] -= sum(kinds[NOTHING_RECOMPUTED] for kinds in runs.ahead.values())
    ahead = {name: LayerMemory(0.0, 0.0, kinds, dict.fromkeys(kinds, 0.0)) for name, kinds in runs.ahead.items()}
    return MemoryFit(
        layers=layers | ahead,
        started={place: _most(constant, name) for place, name in AT_START.items() if name in beside},
        tail=max(0.0, tail),
        exchanged={key[1]: value for key, value in values.items() if key[0] == EXCHANGED},
        fixed={place: value + more for place, value in fixed.items()},
        residuals=tuple(zip(rows, left, strict=True)),
        runs=runs,
    )


def _layer(name: str, inner: str, lightest: float, values: Mapping[Unknown, float]) -> LayerMemory:
    kinds = [kind for what, place, layer, kind in values if (what, place, layer) == (CONSTANT, inner, name)]
    most = max(
        (value for (what, *_), value in values.items() if what == START), default=0.0
    )  # for types not seen there
    return LayerMemory(
        parameter=max(0.0, values[PARAMETER, "", name, ""]),
        start=max(0.0, values.get((START, "", name, ""), most)),
        activation={kind: max(0.0, values[ACTIVATION, "", name, kind]) for kind in kinds},
        transient={kind: values[CONSTANT, inner, name, kind] - lightest for kind in kinds},
    )


def _most(constant: Mapping[tuple[str, str, str], float], wanted: str) -> float:
    """The largest constant of a place, and no less than nothing."""
    return max(0.0, *(value for (place, *_), value in constant.items() if place == wanted))


def _of_other_types(layers: Mapping[str, LayerMemory], together: float | None, lightest: float) -> float:
    """What layers of all types on one stage need beyond those of one, from the constant of the run that has one of each."""
    if together is None:
        return 0.0
    held = [(layer.activation[NOTHING_RECOMPUTED], layer.transient[NOTHING_RECOMPUTED]) for layer in layers.values()]
    return max(0.0, together - lightest - working_memory(held))


def _solved(rows: tuple[Measured, ...]) -> tuple[dict[Unknown, float], list[float]]:
    """The unknowns by least squares of relative errors, and what is left of every row, in MB."""
    deep = {place for place in (FIRST, MIDDLE) if len({row.alive for row in rows if row.place == place}) > 1}
    types = list(dict.fromkeys(row.layer for row in rows if row.layer != TOGETHER))
    factors = [_factors(row, types if row.layer == TOGETHER else [row.layer], deep) for row in rows]
    unknowns = dict.fromkeys(unknown for found in factors for unknown in found)
    matrix = np.array([[found.get(unknown, 0) for unknown in unknowns] for found in factors], float)
    memory = np.array([row.memory_mb for row in rows])
    weighted, scale = matrix / memory[:, None], np.abs(matrix).max(axis=0) / memory.max()
    solved = np.linalg.lstsq(weighted / scale, np.ones(len(rows)), rcond=None)[0] / scale
    return dict(zip(unknowns, solved.tolist(), strict=True)), (memory - matrix @ solved).tolist()


def _factors(row: Measured, types: Sequence[str], deep: set[str]) -> dict[Unknown, int]:
    """How often a small run, which has layers of ``types``, has each unknown."""
    found: dict[Unknown, int] = {(PARAMETER, "", name, ""): row.layers for name in types}
    found[CONSTANT, row.place, row.layer, row.kind] = 1
    if row.place in AT_START.values():
        return found | {(START, "", name, ""): row.layers for name in types}
    found |= {(ACTIVATION, "", name, row.kind): row.layers * row.alive for name in types}
    return found | ({(EXCHANGED, row.place, "", ""): row.alive} if row.place in deep else {})
