"""Memory of layers and stages from small runs, by one least squares over all of them.

    M = layers · parameter + alive · (layers · activation_kind + exchanged_place) + transient_kind + fixed_place

``alive`` are micro-batches kept, ``exchanged`` what a stage keeps of each beside its layers (what it receives, the embedding),
``fixed`` what it needs whatever it holds. How much of ``fixed`` is working memory of the lightest kind cannot be told and does
not matter: ``transient`` is what a kind needs beyond that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindllm.config import RunConfig
from toolkit.dry_run.stages import FIRST, LAST, MIDDLE
from toolkit.pipeline_balance.small_runs import WHOLE, Measured, SmallRuns


@dataclass(frozen=True)
class MemoryFit:
    """Memory in MB.

    Attributes:
        parameter: of a layer: parameters, gradients, optimizer state.
        activation: kept of a layer and micro-batch, by recompute kind.
        transient: working memory beyond that of the lightest kind, by recompute kind.
        exchanged: kept of a micro-batch beside layers, by place.
        fixed: all that is left, by place.
        residuals: every small run, and what it needs beyond the fit.
        runs: the small runs.
    """

    parameter: float
    activation: Mapping[str, float]
    transient: Mapping[str, float]
    exchanged: Mapping[str, float]
    fixed: Mapping[str, float]
    residuals: tuple[tuple[Measured, float], ...]
    runs: SmallRuns

    def static(self, config: RunConfig) -> tuple[float, ...]:
        """What every stage needs beside its layers, ``[stages]``."""
        sizes = config.parallel_config
        found = []
        for stage in range(sizes.pipeline_stage):
            place = FIRST if stage == 0 else LAST if stage == sizes.pipeline_stage - 1 else MIDDLE
            alive = min(sizes.micro_batch_num, sizes.pipeline_stage - stage)
            found.append(max(0.0, self.fixed[place] + alive * self.exchanged.get(place, 0.0)))
        return tuple(found)


def fit_memory(runs: SmallRuns) -> MemoryFit:
    """Shares out the memory of small runs."""
    rows = runs.measured
    places = list(dict.fromkeys(row.place for row in rows))
    kinds = list(dict.fromkeys(row.kind for row in rows))
    deep = [place for place in places if len({row.alive for row in rows if row.place == place}) > 1]
    columns: list[tuple[str, str]] = [("parameter", "")]
    columns += [("activation", kind) for kind in kinds] + [("transient", kind) for kind in kinds if kind != WHOLE]
    columns += [("exchanged", place) for place in deep] + [("fixed", place) for place in places]
    matrix = np.array([[_factor(row, column) for column in columns] for row in rows])
    memory = np.array([row.memory_mb for row in rows])
    weighted, scale = matrix / memory[:, None], np.abs(matrix).max(axis=0) / memory.max()
    solved = np.linalg.lstsq(weighted / scale, np.ones(len(rows)), rcond=None)[0] / scale
    values = dict(zip(columns, solved.tolist(), strict=True))
    left = memory - matrix @ solved
    transient = {kind: values.get(("transient", kind), 0.0) for kind in kinds}
    lightest = min(transient.values())
    return MemoryFit(
        parameter=max(0.0, values["parameter", ""]),
        activation={kind: max(0.0, values["activation", kind]) for kind in kinds},
        transient={kind: value - lightest for kind, value in transient.items()},
        exchanged=_named(values, "exchanged"),
        fixed={place: value + lightest for place, value in _named(values, "fixed").items()},
        residuals=tuple(zip(rows, left.tolist(), strict=True)),
        runs=runs,
    )


def _factor(row: Measured, column: tuple[str, str]) -> float:
    """How often a small run has an unknown."""
    what, which = column
    return {
        "parameter": row.layers,
        "activation": row.layers * row.alive * (row.kind == which),
        "transient": row.kind == which,
        "exchanged": row.alive * (row.place == which),
        "fixed": row.place == which,
    }[what]


def _named(values: Mapping[tuple[str, str], float], what: str) -> dict[str, float]:
    return {name: value for (group, name), value in values.items() if group == what}
