"""A planning problem from simulated runs: every cost is shared out to layers and ends by least squares over all stages.

| what a stage has | is shared out to |
|---|---|
| forward and backward time, memory that stays, memory at the ends of a step | its layers by type, and its place |
| time of what is computed again | its layers by type and recomputation |
| memory that a micro-batch keeps | its layers by type and recomputation, and its place |
| the rest of its peak: working memory | its place, and its layers where all are of one kind; of the last stage, the loss |

Places are the first stage (with the embedding), the last one (with the loss), and those between. Every run is then judged by
the problem as a plan, and the most that a stage needs beyond that is a margin on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from scipy.optimize import nnls

from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED
from mindllm.errors import UserError
from mindllm.parallel.stages import FIRST, LAST, MIDDLE
from mindllm.planning.from_programs.simulated import SimulatedRun, SimulatedStage
from mindllm.planning.from_programs.stage_shapes import (
    Design,
    as_matrix,
    by_kind,
    by_one_kind,
    by_repeated,
    by_type,
    by_type_and_end,
    place_of,
    too_few,
)
from mindllm.planning.plan import Plan, evaluate
from mindllm.planning.problem import STANDARD_KINDS, Problem, RecomputeKind, make_problem
from mindllm.planning.read_problem import Setting
from mindllm.schedules.orders import alive, stage_orders
from mindllm.timing.stage_graph import SELECT
from mindllm.units import MIB

Costs = Mapping[Hashable, float]
LEAST = 0.01  # of the largest value: what is smaller weighs no more


@dataclass(frozen=True)
class StagePeak:
    """Peak of a simulated stage in MB, as simulated and as the problem has it."""

    source: str
    stage: int
    simulated: float
    explained: float


@dataclass(frozen=True)
class SimulatedFit:
    """Costs of layers and places, in ms and MB. ``gaps_mb`` is the most that a pool leaves between blocks."""

    stays: Costs
    kept: Costs
    ends: Costs
    working: Costs
    forward: Costs
    backward: Costs
    again: Costs
    point_to_point: float
    once: float
    gaps_mb: float
    uncounted: tuple[str, ...]
    peaks: tuple[StagePeak, ...] = ()

    @property
    def margin_mb(self) -> float:
        """The most that a simulated stage needs beyond what the problem says."""
        return max([0.0, *(peak.simulated - peak.explained for peak in self.peaks)])


def simulated_problem(
    runs: Sequence[SimulatedRun], setting: Setting, layers: int | None = None
) -> tuple[Problem, SimulatedFit]:
    """The problem of the first run, with what ``setting``, and ``layers`` of the whole model, say otherwise.

    Raises:
        UserError: the runs do not determine a cost, and which run would; or there are fewer layers than types.
    """
    fit = fit_costs(runs)
    fit = replace(fit, peaks=tuple(peak for run in runs for peak in _peaks(run, fit)))
    first = runs[0]
    stages = setting.stages or len(first.stages)
    if stages > 2 and MIDDLE not in fit.stays:
        raise UserError(
            f"--stages {stages}: no simulated run has a stage between the first and the last; add one of three stages or more"
        )
    wanted = _extended(first.layers, layers)
    micro_batches = setting.micro_batches or first.micro_batches
    fields = {**_fields(fit, wanted, stages, micro_batches, setting.chunks or 1), "name": first.source}
    limit = setting.limit_mb or first.limit_mb
    given = {**setting.fields(), "limit_mb": max(0.0, limit - fit.gaps_mb)}
    chosen = {"recompute_kinds": _written(runs, fit)}
    return make_problem({**fields, **chosen, **given}, first.source), fit


def fit_costs(runs: Sequence[SimulatedRun]) -> SimulatedFit:
    """Least squares over all stages of all runs.

    Raises:
        UserError: there are too few runs; names one that helps.
    """
    if error := too_few([run.stages for run in runs], ", ".join(run.source for run in runs)):
        raise error
    stages = [stage for run in runs for stage in run.stages]

    def shared(design: Design, value: Callable[[SimulatedStage], float]) -> Costs:
        return _least_squares(design, stages, value)

    return SimulatedFit(
        stays=shared(by_type, _stays),
        kept=shared(by_kind, lambda stage: stage.memory.kept / MIB),
        ends=shared(by_type, lambda stage: max(0.0, stage.memory.ends / MIB - _stays(stage))),
        working=_working(stages),
        forward=shared(by_type_and_end, lambda stage: stage.graph.passes[FORWARD]),
        backward=shared(by_type_and_end, lambda stage: stage.graph.passes[BACKWARD]),
        again=shared(by_repeated, lambda stage: stage.graph.passes[RECOMPUTED]),
        point_to_point=max(stage.graph.sent for stage in stages),
        once=max(stage.graph.once for stage in stages),
        gaps_mb=max(stage.memory.gaps for stage in stages) / MIB,
        uncounted=tuple(sorted({name for stage in stages for name in stage.graph.uncounted})),
    )


def _least_squares(design: Design, stages: Sequence[SimulatedStage], value: Callable[[SimulatedStage], float]) -> Costs:
    """Values that are not negative; errors weigh relative to what is measured."""
    measured = [stage for stage in stages if design(stage)]
    names, matrix = as_matrix([design(stage) for stage in measured])
    if not names:
        return {}
    values = np.array([value(stage) for stage in measured])
    weights = 1 / np.maximum(values, max(1e-9, LEAST * values.max()))
    solved, _ = nnls(matrix * weights[:, None], values * weights)
    return dict(zip(names, solved.tolist(), strict=True))


def _working(stages: Sequence[SimulatedStage]) -> Costs:
    """Working memory of places, and what kinds of layers need beyond the lightest, from stages that hold one kind.

    That of the last place is what the loss needs, or layers where they need more.
    """
    alone = [stage for stage in stages if by_one_kind(stage)]
    names, matrix = as_matrix([by_one_kind(stage) for stage in alone])
    values = np.array([_rest(stage) for stage in alone])
    solved = np.linalg.lstsq(matrix, values, rcond=None)[
        0
    ]  # kinds and places are open by one constant, which is fixed here
    least = min(value for name, value in zip(names, solved, strict=True) if isinstance(name, tuple))
    found: dict[Hashable, float] = {
        name: max(0.0, float(value - least if isinstance(name, tuple) else value + least))
        for name, value in zip(names, solved, strict=True)
    }
    return {**found, LAST: max(_rest(stage) for stage in stages if stage.place == LAST)}


def _stays(stage: SimulatedStage) -> float:
    """What is there while micro-batches pass: weights gathered for all of them, too."""
    return (stage.memory.stays + stage.memory.shared) / MIB


def _rest(stage: SimulatedStage) -> float:
    memory = stage.memory
    return max(0.0, (memory.passes - memory.alive * memory.kept) / MIB - _stays(stage))


def _extended(layers: Sequence[str], count: int | None) -> tuple[str, ...]:
    """The types of so many layers: the longest run of one type is made longer or shorter."""
    runs = [(name, len(list(group))) for name, group in groupby(layers)]
    longest = max(range(len(runs)), key=lambda number: runs[number][1])
    more = (count or len(layers)) - len(layers)
    if runs[longest][1] + more < 1:
        raise UserError(
            f"--layers {count}: is fewer than the {len(layers) - runs[longest][1] + 1} that each type needs"
        )
    return tuple(name for number, (name, length) in enumerate(runs) for _ in range(length + more * (number == longest)))


def _fields(
    fit: SimulatedFit, layers: Sequence[str], stages: int, micro_batches: int, chunks: int = 1
) -> dict[str, Any]:
    """The problem as plain values, without a limit; the margin is that of the peaks that ``fit`` knows."""
    orders = stage_orders("1f1b", stages, chunks, micro_batches)
    held = [int(vectors.sum(axis=1).max()) for vectors in alive(orders, chunks)]
    places = [place_of(stage, stages) for stage in range(stages)]
    between = [fit.kept.get(MIDDLE, 0.0) * count * (place == MIDDLE) for place, count in zip(places, held, strict=True)]
    middle = fit.stays.get(MIDDLE, 0.0)
    layers_alone = min(fit.working[FIRST], fit.working.get(MIDDLE, fit.working[FIRST]))
    loss = max(0.0, fit.working[LAST] - layers_alone)
    working = [fit.margin_mb + (layers_alone if place == LAST else fit.working[place]) for place in places]
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "layers": _layers(fit, layers),
        "head": _end(fit, FIRST),
        "tail": {**_end(fit, LAST), "transient_mb": loss},
        "static_mb": tuple(
            extra + kept + middle * (place == MIDDLE)
            for extra, kept, place in zip(working, between, places, strict=True)
        ),
        "start_mb": tuple(fit.ends.get(place, 0.0) + fit.margin_mb + middle * (place == MIDDLE) for place in places),
        "point_to_point": fit.point_to_point,
        "exposed_communication": fit.once,
    }


def _layers(fit: SimulatedFit, layers: Sequence[str]) -> list[dict[str, Any]]:
    runs = [(name, len(list(group))) for name, group in groupby(layers)]
    return [
        {
            "name": name if [other for other, _ in runs].count(name) == 1 else f"{name}, run {number}",
            "count": count,
            "forward": fit.forward[name],
            "parameter_mb": fit.stays[name],
            "start_mb": fit.ends[name],
            "kinds": {
                kind[1]: {
                    "backward": fit.backward[name] + fit.again.get(kind, 0.0),
                    "activation_mb": fit.kept[kind],
                    "transient_mb": fit.working[kind],
                }
                for kind in fit.kept
                if isinstance(kind, tuple) and kind[0] == name
            },
        }
        for number, (name, count) in enumerate(runs, 1)
    ]


def _end(fit: SimulatedFit, place: str) -> dict[str, float]:
    return {
        "forward": fit.forward[place],
        "backward": fit.backward[place],
        "memory_mb": fit.stays[place],
        "activation_mb": fit.kept[place],
    }


def _peaks(run: SimulatedRun, fit: SimulatedFit) -> list[StagePeak]:
    """Every stage of a run, judged as a plan of the problem that the fit makes of it."""
    fields = _fields(fit, run.layers, len(run.stages), run.micro_batches)
    plan = Plan(tuple(tuple(kind for _, kind in stage.layers) for stage in run.stages))
    explained = evaluate(make_problem(fields, run.source), plan).peak_mb
    return [
        StagePeak(run.source, number, max(stage.memory.passes, stage.memory.ends) / MIB, float(said))
        for number, (stage, said) in enumerate(zip(run.stages, explained, strict=True))
    ]


def _written(runs: Sequence[SimulatedRun], fit: SimulatedFit) -> dict[str, RecomputeKind]:
    """How the kinds that were met are written as keys of MindFormers.

    Raises:
        UserError: runs select operators by different patterns.
    """
    met = dict.fromkeys(kind[1] for kind in fit.kept if isinstance(kind, tuple))
    selecting = [run for run in runs if any(kind == SELECT for stage in run.stages for _, kind in stage.layers)]
    patterns = dict.fromkeys(run.patterns for run in selecting)
    if len(patterns) > 1:
        raise UserError(
            f"{selecting[1].source}: selects by other patterns than {selecting[0].source}; simulate with one"
        )
    chosen = next(iter(patterns), ())
    selected = RecomputeKind(select_recompute=chosen or True)
    return {name: selected if name == SELECT else STANDARD_KINDS[name] for name in met}
