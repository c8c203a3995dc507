"""Small runs whose memory tells what a layer, a recompute kind and the ends of a pipeline need.

They have 2 and 3 layers, all of one kind, on a stage like one of the run that is planned: a middle one for every kind (the first
one where there are two stages), the first and the last one for layers kept whole and for layers recomputed fully, which need
the most working memory. Where the pipeline is longer than two stages they keep 2 and 3 (or 4) micro-batches alive. Most are also
runs that the dry run of a plan extrapolates from, and what was simulated once is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindllm.compiled.simulation import ACTIVATIONS
from mindllm.config import RunConfig, override_config
from mindllm.planning.problem import RecomputeKind
from toolkit.dry_run.extrapolate import FEWEST_ALIVE, FEWEST_LAYERS, Design
from toolkit.dry_run.moments import Fill, Moments, bytes_of
from toolkit.dry_run.reduced import Point, deepening, middle_deepening, reduced_run
from toolkit.dry_run.simulations import Request, Simulations
from toolkit.dry_run.stages import FIRST, LAST, MIDDLE, Run, Stage
from toolkit.pipeline_balance.offered_kinds import layer_kind

MIB = 1 << 20
LAST_LAYERS = "last, in its layers"  # at the moment that is the fullest one of a stage without output layer and loss
WHOLE, FULL = "none", "full"  # the kinds that keep everything and next to nothing
EVEN = 2  # number of the middle stage that stands for all: an even one, which needs no less than an odd one
AT_START = {place: f"{place}, at the start" for place in (MIDDLE, LAST)}  # the first stage keeps more later
EMPTY, SHARE = 0.1, 0.5  # of the most activations that any moment holds


@dataclass(frozen=True)
class Measured:
    """Memory of one small run at its fullest moment that holds activations, in MB.

    Attributes:
        place: ``first``, ``middle`` or ``last`` stage, :data:`LAST_LAYERS`, or one of :data:`AT_START`.
        kind: recompute kind of all its layers.
        alive: micro-batches kept.
    """

    place: str
    kind: str
    layers: int
    alive: int
    memory_mb: float


@dataclass(frozen=True)
class SmallRuns:
    """What the small runs need.

    Attributes:
        gaps_mb: the largest gaps between blocks, in MB: they do not grow with a stage.
        estimated: whether memory comes from compiled graphs instead of MindSpore's dry run.
    """

    measured: tuple[Measured, ...]
    gaps_mb: float
    count: int
    estimated: bool


def one_chunk(config: RunConfig) -> RunConfig:
    """The run without interleaving, offsets and recomputation: what small runs are cut from."""
    plain = {
        "model.model_config.pp_interleave_num": 1,
        "model.model_config.offset": [0] * config.parallel_config.pipeline_stage,
        "model.model_config.num_layers": config.parallel_config.pipeline_stage,
        "parallel.pipeline_config.pipeline_interleave": False,
        **{f"recompute_config.{key}": False for key in ("recompute", "select_recompute", "select_comm_recompute")},
    }
    return override_config(config, plain)


def run_small(config: RunConfig, kinds: Mapping[str, RecomputeKind], simulations: Simulations) -> SmallRuns:
    """Simulates the small runs of ``config``, whose layers may be recomputed as ``kinds`` say."""
    stages = config.parallel_config.pipeline_stage
    plain = one_chunk(config)
    inner = MIDDLE if stages > 2 else FIRST
    wanted = [(inner, name) for name in kinds]
    wanted += [(place, name) for place in (FIRST, LAST) if place != inner for name in (WHOLE, FULL)]
    longer = deepening(plain, FEWEST_ALIVE, stages) if stages > 2 else None
    design = {FIRST: _design(longer), MIDDLE: _design(middle_deepening(plain, EVEN)), LAST: _design(None, alive=1)}
    asked = [(place, name, point) for place, name in wanted for point in design[place].points]
    requests = [_request(plain, place, name, kinds[name], point) for place, name, point in asked]
    found = dict(zip(asked, simulations.profiles(requests), strict=True))
    rows, moments = list[Measured](), dict[str, str]()
    for (place, name, point), profile in found.items():
        moment = _fullest(profile.moments)
        rows.append(_measured(place, name, point, profile.moments[moment]))
        if name == FULL and place in AT_START:
            rows.append(_measured(AT_START[place], name, point, profile.moments[_start(profile.moments)]))
        if place == inner:
            moments[name] = moment
        elif place == LAST and moments[name] in profile.moments:
            rows.append(_measured(LAST_LAYERS, name, point, profile.moments[moments[name]]))
    gaps = max(profile.gaps for profile in found.values()) / MIB
    estimated = any(profile.estimated for profile in found.values())
    return SmallRuns(tuple(rows), gaps, len(requests), estimated)


def _design(deepening: int | None, alive: int = FEWEST_ALIVE) -> Design:
    more = deepening or 1
    base = Point((FEWEST_LAYERS,), alive, alive + more + 1)  # so that the deeper pipeline, too, is full for a while
    return Design(base, (0,), 1, deepening is not None, None, None, deepening=more)


def _measured(place: str, kind: str, point: Point, fill: Fill) -> Measured:
    return Measured(place, kind, point.layers[0], point.alive, bytes_of(fill) / MIB)


def _fullest(moments: Moments) -> str:
    """The fullest of the moments that hold activations of layers, as the peak of a stage does whose memory is scarce.

    In a small stage another moment may need more: the start of a step, when weights are cast and gathered, or their update.
    """
    held = _held(moments)
    full = SHARE * max(held.values())
    return max((name for name in moments if held[name] >= full), key=lambda name: bytes_of(moments[name]))


def _start(moments: Moments) -> str:
    """The fullest of the moments with next to no activations: when a step starts, or ends with the update."""
    held = _held(moments)
    empty = EMPTY * max(held.values())
    return max((name for name in moments if held[name] <= empty), key=lambda name: bytes_of(moments[name]))


def _held(moments: Moments) -> dict[str, int]:
    """Bytes of activations at every moment; casts of weights, which belong to no cell, are none."""
    return {
        name: sum(size for use, size in fill.items() if use.category == ACTIVATIONS and use.path)
        for name, fill in moments.items()
    }


def _request(plain: RunConfig, place: str, name: str, kind: RecomputeKind, point: Point) -> Request:
    stages = plain.parallel_config.pipeline_stage
    number = {FIRST: 0, MIDDLE: EVEN, LAST: stages - 1}[place]
    stage = Stage(number, 0, place, (Run(0, layer_kind(kind), point.layers[0]),), point.alive)
    reduced, rank = reduced_run(plain, stage, point)
    return Request(reduced, rank, f"{place} stage, {point.layers[0]} layers {name}, {point.alive} micro-batches alive")
