"""Small runs whose memory tells what a layer, a recompute kind and the ends of a pipeline need.

They have 2 and 3 layers, all of one type and recomputed alike, on a stage like one of the run that is planned: a middle one for
every recompute kind (the first one where there are two stages), the first and the last one for layers kept whole and for layers
recomputed fully, which need the most working memory. Where the pipeline is longer than two stages they keep 2 and 3 (or 4)
micro-batches alive. Where layers of the model differ, all this is done with each type (the first stage: with the model's first),
and one more run has a layer of each: what they read, tables of positions and masks, is there for all of them. Most are also runs
that the dry run of a plan extrapolates from, and what was simulated once is kept.

A layer that predicts ahead is always the last one of the last stage. Runs about that stage have it, kept whole, since it cannot
be recomputed where layers before it are not, and layers of the model's last type; further ones recompute it and all others, and
tell its kinds apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindllm.architecture.layer_kind import LayerKind
from mindllm.compiled.simulation.simulation import ACTIVATIONS
from mindllm.config import RunConfig
from mindllm.dry_run.extrapolate import FEWEST_ALIVE, FEWEST_LAYERS, Design
from mindllm.dry_run.moments import Fill, Moments, bytes_of
from mindllm.dry_run.profile import Profile
from mindllm.dry_run.simulations import Request, Simulations
from mindllm.parallel.stages import FIRST, LAST, MIDDLE, Run, Stage
from mindllm.planning.costs.layer_kinds import main_and_ahead, recomputed
from mindllm.planning.problem import RecomputeKind
from mindllm.reduced_runs.even import even_run
from mindllm.reduced_runs.stage import Point, deepening, middle_deepening, reduce_to_stage
from mindllm.units import MIB

LAST_LAYERS = "last, in its layers"  # at the moment that is the fullest one of a stage without output layer and loss
NOTHING_RECOMPUTED, ALL_RECOMPUTED = "none", "full"  # the kinds that keep everything and next to nothing
EVEN = 2  # number of the middle stage that stands for all: an even one, which needs no less than an odd one
AT_START = {place: f"{place}, at the start" for place in (MIDDLE, LAST)}  # the first stage keeps more later
TOGETHER = "one of each"  # type of the layers of the run that has all of them
EMPTY, SHARE = 0.1, 0.5  # of the most activations that any moment holds


@dataclass(frozen=True)
class Measured:
    """Memory of one small run at its fullest moment that holds activations, in MB.

    Attributes:
        place: ``first``, ``middle`` or ``last`` stage, :data:`LAST_LAYERS`, or one of :data:`AT_START`.
        layer: type of all its layers, or :data:`TOGETHER`.
        kind: recompute kind of all its layers.
        layers: how many of a type there are.
        alive: micro-batches kept.
    """

    place: str
    layer: str
    kind: str
    layers: int
    alive: int
    memory_mb: float


@dataclass(frozen=True)
class SmallRuns:
    """What the small runs need.

    Attributes:
        ahead: what a layer that predicts ahead needs beyond one that is recomputed fully, in MB by its type and recompute kind;
            empty where there is none.
        gaps_mb: the largest gaps between blocks, in MB: they do not grow with a stage.
    """

    measured: tuple[Measured, ...]
    ahead: Mapping[str, Mapping[str, float]]
    gaps_mb: float
    count: int


def run_small(
    config: RunConfig, layers: Mapping[str, LayerKind], kinds: Mapping[str, RecomputeKind], simulations: Simulations
) -> SmallRuns:
    """Simulates the small runs of ``config``, which has these layers and may recompute them as ``kinds`` say."""
    stages = config.parallel_config.pipeline_stage
    plain = even_run(config)
    inner = MIDDLE if stages > 2 else FIRST
    longer = deepening(plain, FEWEST_ALIVE, stages) if stages > 2 else None
    design = {FIRST: _design(longer), MIDDLE: _design(middle_deepening(plain, EVEN)), LAST: _design(None, alive=1)}
    main, ahead = main_and_ahead(layers)
    behind = (Run(0, layers[ahead], 1),) if ahead else ()
    wanted = [
        _wanted(place, (layer, name), recomputed(layers[layer], kinds[name]), point, behind if place == LAST else ())
        for place, layer, name in _combinations(inner, main, main[-1:] if ahead else main, kinds)
        for point in design[place].points
    ]
    if len(main) > 1:
        base = design[inner].base
        each = Point((1,) * len(main), base.alive, base.micro_batches)
        runs = tuple(Run(0, layers[layer], 1) for layer in main)
        wanted.append(_Wanted(inner, TOGETHER, NOTHING_RECOMPUTED, each, runs))
    every = recomputed(layers[main[-1]], kinds[ALL_RECOMPUTED])
    further = {
        name: _wanted(
            LAST,
            (main[-1], ALL_RECOMPUTED),
            every,
            design[LAST].base,
            (Run(0, recomputed(layers[ahead], kinds[name]), 1),),
        )
        for name in kinds
        if ahead
    }
    profiles = simulations.profiles([one.request(plain) for one in [*wanted, *further.values()]])
    own, of_ahead = profiles[: len(wanted)], profiles[len(wanted) :]
    rows, moments = list[Measured](), dict[tuple[str, str], str]()
    for one, profile in zip(wanted, own, strict=True):
        moment, both = _fullest(profile.moments), (one.layer, one.kind)
        rows.append(one.measured(one.place, profile.moments[moment]))
        if one.kind == ALL_RECOMPUTED and one.place in AT_START:
            rows.append(one.measured(AT_START[one.place], profile.moments[_start(profile.moments)]))
        if one.place == inner:
            moments[both] = moment
        elif one.place == LAST and moments[both] in profile.moments:
            rows.append(one.measured(LAST_LAYERS, profile.moments[moments[both]]))
    gaps = max(profile.gaps for profile in profiles) / MIB
    beyond = {ahead: _beyond_full(dict(zip(further, of_ahead, strict=True)))} if ahead else {}
    return SmallRuns(tuple(rows), beyond, gaps, len(wanted) + len(set(further) - {NOTHING_RECOMPUTED}))


def _beyond_full(profiles: Mapping[str, Profile]) -> dict[str, float]:
    """What the fullest moment of each needs beyond that of the one for :data:`ALL_RECOMPUTED`, in MB."""
    needs = {name: bytes_of(profile.moments[_fullest(profile.moments)]) for name, profile in profiles.items()}
    return {name: max(0, needed - needs[ALL_RECOMPUTED]) / MIB for name, needed in needs.items()}


@dataclass(frozen=True)
class _Wanted:
    """A small run to simulate: the stage it is about, its layers by type and recompute kind, and how large it is."""

    place: str
    layer: str
    kind: str
    point: Point
    runs: tuple[Run, ...]

    def request(self, plain: RunConfig) -> Request:
        stages = plain.parallel_config.pipeline_stage
        number = {FIRST: 0, MIDDLE: EVEN, LAST: stages - 1}[self.place]
        reduced, rank = reduce_to_stage(plain, Stage(number, 0, self.place, self.runs, self.point.alive), self.point)
        what = f"{sum(self.point.layers)} layers {', '.join(dict.fromkeys(run.kind.name for run in self.runs))}"
        return Request(reduced, rank, f"{self.place} stage, {what}, {self.point.alive} micro-batches alive")

    def measured(self, place: str, fill: Fill) -> Measured:
        return Measured(place, self.layer, self.kind, self.point.layers[0], self.point.alive, bytes_of(fill) / MIB)


def _wanted(place: str, names: tuple[str, str], kind: LayerKind, point: Point, behind: tuple[Run, ...]) -> _Wanted:
    """A run whose layers are all of one kind but for those ``behind`` them; ``names``: of the layer, of its recomputation."""
    runs = tuple(Run(0, kind, count) for count in point.layers) + behind
    larger = replace(point, layers=(*point.layers, *(run.count for run in behind)))
    return _Wanted(place, *names, larger, runs)


def _combinations(
    inner: str, layers: Sequence[str], last: Sequence[str], kinds: Iterable[str]
) -> list[tuple[str, str, str]]:
    """Stage, name of the layers and recompute kind of all small runs; those of the inner stage come first.

    ``last``: layers that the last stage is looked at with.
    """
    wanted = [(inner, layer, name) for layer in layers for name in kinds]
    ends = {FIRST: layers[:1], LAST: last}
    return wanted + [
        (place, layer, name)
        for place, held in ends.items()
        if place != inner
        for layer in held
        for name in (NOTHING_RECOMPUTED, ALL_RECOMPUTED)
    ]


def _design(deepening: int | None, alive: int = FEWEST_ALIVE) -> Design:
    more = deepening or 1
    base = Point((FEWEST_LAYERS,), alive, alive + more + 1)  # so that the deeper pipeline, too, is full for a while
    return Design(base, (0,), deepening is not None, None, None, deepening=more)


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
