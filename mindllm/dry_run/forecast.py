"""The memory of every stage: simulated whole, or extrapolated from smaller simulations and checked against a further one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from mindllm.compiled.simulation.somas import SOMAS
from mindllm.config import RunConfig
from mindllm.dry_run.extrapolate import FEWEST_ALIVE, Design, design_for, exact_stage, whole_stage
from mindllm.dry_run.moments import (
    Fill,
    Moments,
    by_category,
    bytes_of,
    fullest,
    own_bytes_of,
    planned_bytes_of,
    with_planned,
)
from mindllm.dry_run.profile import Profile
from mindllm.dry_run.simulations import Request, Simulations
from mindllm.parallel.stages import FIRST, MIDDLE, ONLY, Stage
from mindllm.reduced_runs.stage import (
    Point,
    can_be_first,
    chunks_of,
    deepening,
    middle_deepening,
    pipeline_length,
    pipeline_places,
    point_of,
    reduce_to_stage,
)

TOLERANCE, TOLERATED_BYTES = 0.0005, 1 << 16  # of the peak of the checking simulation
SIMULATION, OTHER_STAGE, SCHEDULED, BETWEEN = 0.7, 0.25, 0.035, 1.5  # see _cost
NEAR = 0.9  # of that peak: a moment as full as this must be among those that are extrapolated


@dataclass(frozen=True)
class StageMemory:
    """What a stage needs, in bytes.

    Attributes:
        moments: its fullest moments; the peak is the fullest of them.
        actual_peak: with fragments, the gaps between blocks.
        method: how it was found, in a few words.
        shown: the simulation a picture is drawn of: the stage itself, or the largest of the smaller ones.
        exact: whether ``shown`` is the stage itself.
        planned: what lies in blocks of planned memory at its fullest moment.
    """

    stage: Stage
    moments: Moments
    actual_peak: int
    method: str
    shown: Profile = field(repr=False)
    exact: bool
    planned: Fill = field(default_factory=dict)

    @property
    def estimated(self) -> bool:
        """Whether the figures are estimates from compiled graphs instead of MindSpore's dry run."""
        return self.shown.estimated

    @cached_property
    def peak(self) -> Fill:
        """What fills the memory at the peak."""
        return with_planned(fullest(self.moments), self.planned)

    @property
    def planned_bytes(self) -> int:
        """Of the peak: blocks of a memory that MindSpore plans as a whole."""
        return planned_bytes_of(fullest(self.moments))

    @property
    def used_peak(self) -> int:
        return bytes_of(self.peak)

    @property
    def by_category(self) -> Mapping[str, int]:
        """Bytes at the peak by category; they add up to ``used_peak``."""
        return by_category(self.peak)


def simulate_stages(config: RunConfig, stages: Sequence[Stage], simulations: Simulations) -> list[StageMemory]:
    """Simulates the first rank of every stage as it is, all layers and micro-batches."""
    requests = [Request(config, stage.rank, f"stage {stage.number}") for stage in stages]
    return [
        _as_simulated(stage, profile) for stage, profile in zip(stages, simulations.profiles(requests), strict=True)
    ]


def forecast_stages(
    config: RunConfig, stages: Sequence[Stage], simulations: Simulations, whole: bool = True
) -> list[StageMemory]:
    """Finds the memory of stages from as few and small simulations as give the figures of the whole ones.

    Stages that are alike share simulations. Where the simulation that checks an extrapolation disagrees with it, the stages
    are simulated with all their layers, or, without ``whole``, left out of what is returned. So are stages that sequences go
    through in pieces, how whose memory grows with layers and micro-batches was not studied, and those of which ``swap_config``
    numbers layers, which small runs do not have.
    """
    if config.parallel_config.seq_split_num > 1 or config.swap_config.numbers():
        return simulate_stages(config, stages, simulations) if whole else []
    planned = [planned for alike in _alike(config, stages) for planned in _designs(config, alike, whole)]
    found, failed = _carry_out(config, planned, simulations)
    for larger in (
        (lambda stage: _whole(config, stage), lambda stage: exact_stage(point_of(stage, config))) if whole else ()
    ):
        again = [(larger(stage), [stage]) for stage in failed]
        more, failed = _carry_out(config, again, simulations)
        found += more
    return sorted(found, key=lambda memory: memory.stage.number)


Planned = tuple[Design, list[Stage]]


def _alike(config: RunConfig, stages: Sequence[Stage]) -> list[list[Stage]]:
    groups: dict[tuple, list[Stage]] = {}
    for stage in sorted(stages, key=lambda stage: stage.number % 2):  # even ones, which need no less, stand for all
        apart = stage.number if config.model.config.pp_interleave_num > 1 else stage.alive % _deepening(config, stage)
        groups.setdefault((stage.likeness, apart), []).append(stage)
    return list(groups.values())


def _deepening(config: RunConfig, stage: Stage) -> int:
    """By how many micro-batches alive the small runs of a stage without chunks differ."""
    return middle_deepening(config, stage.number) if stage.place == MIDDLE else 1


def _designs(config: RunConfig, alike: list[Stage], whole: bool) -> list[Planned]:
    """One design for all, or for each stage its own, where that takes no longer: whatever is cheaper to simulate.

    A whole stage also has the gaps between blocks that the real one has. Without ``whole`` it is taken where there is no other.
    """
    interleaved = config.model.config.pp_interleave_num > 1
    checked = config.context.memory_optimize_level != "O1"  # what lies in memory that is planned no further run checks
    shorter = alike[0].place in (FIRST, MIDDLE) and not interleaved
    targets = [point_of(stage, config) for stage in alike]
    deeper: int | None = _deepening(config, alike[0])
    if alike[0].place == FIRST and shorter and targets[0].alive > FEWEST_ALIVE:
        deeper = deepening(config, FEWEST_ALIVE, targets[0].alive)
    design = design_for(
        targets, _micro_step(config), shorter and deeper is not None, interleaved, deeper or 1,
        lambda alive: pipeline_length(config, alike[0], alive), checked and not interleaved,
    )  # fmt: skip
    if design and not whole:
        return [(design, alike)]
    wholes = [(_whole(config, stage), [stage]) for stage in alike]
    if design and _cost(config, [(design, alike)]) < _cost(config, wholes):
        return [(design, alike)]
    return wholes


def _cost(config: RunConfig, designs: Sequence[Planned]) -> float:
    """Processor time of simulations, in layers that are compiled; what several designs have in common counts once.

    As measured on Llama 3 8B, Llama 2 70B and MindSpore 2.10: a simulation without layers, another stage of its pipeline, a layer
    that is scheduled for one micro-batch more, and in such layers what each chunk has of its own. Accumulation steps, without a
    pipeline, are compiled one by one.
    """
    points = {(alike[0].likeness, point): alike[0] for design, alike in designs for point in design.points}
    cost = 0.0
    for (_, point), stage in points.items():
        layers, places = sum(point.layers), pipeline_places(config, stage, point)
        scheduled = layers if stage.place == ONLY else SCHEDULED * (layers + BETWEEN * chunks_of(config, stage, point))
        cost += SIMULATION + OTHER_STAGE * (places - 1) + layers + scheduled * point.micro_batches
    return cost


def _whole(config: RunConfig, stage: Stage) -> Design:
    """All layers of a stage and few micro-batches, or all of both, whichever is cheaper.

    What micro-batches cost is seen with one layer of each chunk and specification, and as few alive as can be: of several runs
    the last, which recomputes least, so that stages which differ in recomputation alone share these simulations.
    """
    target, step = point_of(stage, config), _micro_step(config)
    last = {(run.chunk, run.kind.spec): index for index, run in enumerate(stage.runs)}
    layers = tuple(int(index in last.values()) for index in range(len(stage.runs)))
    chunks = config.model.config.pp_interleave_num
    ahead = stage.place in (FIRST, MIDDLE)  # on the last stage it is chance whether the loss meets what is sent back
    fewer = ahead and (step > 1 if chunks > 1 else can_be_first(config, FEWEST_ALIVE))
    alive = min(stage.alive, FEWEST_ALIVE) if fewer else stage.alive
    small = Point(layers, alive, 0, chunks if fewer and chunks > 1 else 0)
    small_step = pipeline_length(config, stage, small.alive, small.short) if small.short else step
    few = whole_stage(target, step, small, small_step, lambda alive: pipeline_length(config, stage, alive))
    return min(exact_stage(target), few, key=lambda design: _cost(config, [(design, [stage])]))


def _micro_step(config: RunConfig) -> int:
    """Micro-batches of interleaved chunks come in multiples of the number of stages, but in a V, where they do not."""
    in_groups = config.model.config.pp_interleave_num > 1 and not config.parallel.pipeline_config.v_shape
    return config.parallel_config.pipeline_stage if in_groups else 1


def _carry_out(
    config: RunConfig, designs: Sequence[Planned], simulations: Simulations
) -> tuple[list[StageMemory], list[Stage]]:
    """Runs the simulations of all designs together; returns what was found, and the stages whose check disagreed."""
    wanted = [(alike[0], point) for design, alike in designs for point in design.points]
    profiles = iter(simulations.profiles([_request(config, like, point) for like, point in wanted]))
    found: list[StageMemory] = []
    failed: list[Stage] = []
    for design, alike in designs:
        mine = {point: next(profiles) for point in design.points}
        reliable = _reliable(design, mine)
        for stage in alike:
            if reliable is None or not _understood(point_of(stage, config), design, mine, reliable):
                failed.append(stage)
            else:
                found.append(_extrapolated(config, stage, design, mine, reliable))
    return found, failed


def _request(config: RunConfig, like: Stage, point: Point) -> Request:
    reduced, rank = reduce_to_stage(config, like, point)
    layers = "+".join(map(str, point.layers))
    return Request(reduced, rank, f"stage {like.number} with {layers} layers, {point.micro_batches} micro-batches")


def _moments(profiles: Mapping[Point, Profile]) -> dict[Point, Moments]:
    return {point: profile.moments for point, profile in profiles.items()}


def _reliable(design: Design, profiles: Mapping[Point, Profile]) -> set[str] | None:
    """The kinds of moments that were extrapolated right for the checking simulation; None if its peak was not.

    Without one, micro-batches are all that is extrapolated, and they should matter next to nothing: a moment that they add more
    than that to is not.
    """
    predicted, seen = _checked(design, profiles)
    sizes = {kind: own_bytes_of(fill) for kind, fill in seen.moments.items()}
    peak = max(sizes.values())
    tolerance = TOLERANCE * peak + TOLERATED_BYTES
    right = {kind for kind, size in sizes.items() if abs(own_bytes_of(predicted.get(kind, {})) - size) <= tolerance}
    if max((sizes[kind] for kind in right), default=0) < peak - tolerance:
        return None
    return right if design.check else right | (set(profiles[design.base].moments) - set(sizes))


def _understood(target: Point, design: Design, profiles: Mapping[Point, Profile], right: Set[str]) -> bool:
    """Whether no moment that was extrapolated wrong can be the peak at ``target``.

    Of such a moment, what not all simulations have is taken to be there by chance. What it had more than was said then grows,
    at most, as :func:`_grown` says; of one that had less, what is said is enough. Next to the peak there are moments that have
    but a scalar more, which is no other figure. Where nothing was said of a moment, it must be far below the peak.
    """
    if design.check is None:
        base = profiles[design.base]
        near = {kind for kind, fill in base.moments.items() if own_bytes_of(fill) >= NEAR * own_bytes_of(base.peak)}
        return near <= right
    predicted, seen = _checked(design, profiles, growing=False)
    sure, there = (design.predict(target, _moments(profiles), growing) for growing in (True, False))
    peak = max(own_bytes_of(sure[kind]) for kind in right)
    for kind, fill in seen.moments.items():
        if kind in right:
            continue
        if kind not in there:
            if own_bytes_of(fill) >= NEAR * own_bytes_of(seen.peak):
                return False
            continue
        farther = _distance(design.base, target) / _distance(design.base, design.check)
        if own_bytes_of(there[kind]) + _grown(fill, predicted[kind], farther, design.alive) > peak + TOLERATED_BYTES:
            return False
    return True


def _grown(seen: Fill, said: Fill, farther: float, alive: bool) -> float:
    """What a moment had more than was said of it, where a stage is ``farther`` from the base than the checking simulation.

    Layers may each have their part of it, and with ``alive`` each micro-batch that is kept alive. Where only layers are more,
    activations outside of them stay what they are: whether the loss of one micro-batch meets what the embedding of the next has
    written is a matter of order, and both are there once.
    """
    surplus = own_bytes_of(seen) - own_bytes_of(said)
    fixed = 0 if alive else sum(seen.get(use, 0) - said.get(use, 0) for use in {*seen, *said} if use.is_outside_layers)
    growing = surplus - fixed
    return max(0.0, farther * growing + fixed if growing > 0 else surplus)


def _checked(design: Design, profiles: Mapping[Point, Profile], growing: bool = True) -> tuple[Moments, Profile]:
    """What is said of the checking simulation, or the one nearest to it, and what it says itself."""
    if design.check:
        return design.predict(design.check, _moments(profiles), growing), profiles[design.check]
    fewer, more = design.passing or (design.base, design.base)
    return profiles[fewer].moments, profiles[more]


def _distance(base: Point, point: Point) -> int:
    return sum(point.layers) - sum(base.layers) + point.alive - base.alive


def _extrapolated(
    config: RunConfig, stage: Stage, design: Design, profiles: Mapping[Point, Profile], reliable: Set[str]
) -> StageMemory:
    target = point_of(stage, config)
    if target in profiles:
        profile = profiles[target]
        return _as_simulated(stage, profile)
    moments = {kind: fill for kind, fill in design.predict(target, _moments(profiles)).items() if kind in reliable}
    used = bytes_of(fullest(moments))
    gaps = max(profile.gaps for profile in profiles.values())
    largest = profiles[design.check or design.base]
    what = f"{len(profiles)} smaller runs" if design.varied or design.alive else "fewer micro-batches"
    method = f"{'estimate, ' * largest.estimated}extrapolated: {what}"
    return StageMemory(stage, moments, used + gaps, method, largest, False, _planned(design, target, profiles))


def _planned(design: Design, target: Point, profiles: Mapping[Point, Profile]) -> Fill:
    """What lies in planned memory, from smaller runs. Where their fullest moments differ, some would be less than nothing."""
    fills = {point: {SOMAS: profile.planned} for point, profile in profiles.items()}
    return {use: size for use, size in design.predict(target, fills)[SOMAS].items() if size > 0}


def _as_simulated(stage: Stage, profile: Profile) -> StageMemory:
    method = _simulated(profile)
    return StageMemory(stage, profile.moments, profile.actual_peak, method, profile, True, profile.planned)


def _simulated(profile: Profile) -> str:
    return "estimate from the compiled graph" if profile.estimated else "simulated"
