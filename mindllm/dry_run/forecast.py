"""The memory of every stage: simulated whole, or extrapolated from smaller simulations and checked against a further one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from mindllm.compiled.simulation.memory_tracker import SOMAS
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
from mindllm.dry_run.workspace import peak_with_workspace
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
AS_RECOMPUTED = ("Gradients/Default/", "Gradients/recompute_Default/", 1)
NEAR = 0.9  # of that peak: a moment as full as this must be among those that are extrapolated


@dataclass(frozen=True)
class StageMemory:
    """What a stage needs, in bytes.

    Attributes:
        moments: its fullest moments; the peak is the fullest of them.
        actual_peak: with fragments, the gaps between blocks, which only the dry run's pool has (:attr:`device_peak`).
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
    def device_peak(self) -> int:
        """Return the bytes that the pool of a device needs, which the limit bounds.

        They have no gaps between blocks. When memory runs short, MindSpore maps idle pages of 2 MB to other addresses, by
        default on Atlas A2 and A3 with driver 24 or newer. Its dry run has no such mapping.
        """
        return self.used_peak

    def with_workspace(self, attention_elements: int) -> int:
        """Return the peak of a device with the estimated workspace of kernels (:mod:`mindllm.dry_run.workspace`)."""
        return self.device_peak + max(0, peak_with_workspace(self.moments, attention_elements) - self.used_peak)

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
    found, failed = _carry_out(config, _all_simulations(config, stages, whole), simulations)
    for larger in (
        (lambda stage: _whole(config, stage), lambda stage: exact_stage(point_of(stage, config))) if whole else ()
    ):
        again = [_alone(config, larger(stage), stage) for stage in failed]
        more, failed = _carry_out(config, again, simulations)
        found += more
    return sorted(found, key=lambda memory: memory.stage.number)


class Planned(NamedTuple):
    """Simulations, and the stages whose memory they give.

    Attributes:
        like: the stage that simulations are of. It has all kinds of layers that the others have, these perhaps fewer.
        targets: where the stages are, in layers of the runs of ``like``.
    """

    design: Design
    like: Stage
    targets: list[tuple[Stage, Point]]


def _alone(config: RunConfig, design: Design, stage: Stage) -> Planned:
    return Planned(design, stage, [(stage, point_of(stage, config))])


def _all_simulations(config: RunConfig, stages: Sequence[Stage], whole: bool) -> list[Planned]:
    """All simulations. Stages that lack kinds of layers share those of stages with more, where that is cheaper."""
    planned: list[Planned] = []
    for alike in sorted(_alike(config, stages), key=lambda alike: -len(alike[0].runs)):
        shared = [more for one in planned if (more := _sharing(config, one, alike))]
        choices = [_designs(config, alike, whole), *([more] for more in shared)]
        planned += min(choices, key=lambda more: _cost(config, [*planned, *more]))
    return planned


def _sharing(config: RunConfig, one: Planned, alike: list[Stage]) -> Planned | None:
    """The simulations of stages with more kinds of layers for those that lack some, with a check of their own that lacks them.

    None where these do not tell of such stages.
    """
    design, base = one.design, one.design.base
    counts = [found for stage in alike if stage.runs and (found := _layers_like(stage, one.like))]
    if design.check is None or design.together or not alike[0].place == one.like.place == MIDDLE or not counts:
        return None
    fixed = [run for run in range(len(base.layers)) if run not in design.varied]
    if any(count[run] != base.layers[run] for count in counts for run in fixed):
        return None
    deeper = [stage.alive - base.alive for stage in alike]
    if any(more % design.deepening for more in deeper) if design.alive else any(deeper):
        return None
    there = [run for run, count in enumerate(counts[0]) if count]
    lacking = sum(count for run, count in enumerate(base.layers) if run not in there)  # so that the check is no smaller
    layers = [count if run in there else 0 for run, count in enumerate(design.check.layers)]
    layers[there[0]] += lacking
    check = replace(design.check, layers=tuple(layers), alive=min(design.check.alive, base.alive + max(deeper)))
    targets = [replace(point_of(stage, config), layers=count) for stage, count in zip(alike, counts, strict=True)]
    return Planned(replace(design, check=check), one.like, list(zip(alike, targets, strict=True)))


def _layers_like(stage: Stage, like: Stage) -> tuple[int, ...] | None:
    """Layers of a stage in the runs of one with more kinds of layers, 0 in those that it lacks; None if it is no such stage."""
    waiting, layers = list(stage.runs), []
    for run in like.runs:
        same = waiting and (waiting[0].chunk, waiting[0].kind) == (run.chunk, run.kind)
        layers.append(waiting.pop(0).count if same else 0)
    return None if waiting else tuple(layers)


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
    small = [Planned(design, alike[0], list(zip(alike, targets, strict=True)))] if design else []
    if small and not whole:
        return small
    wholes = [_alone(config, _whole(config, stage), stage) for stage in alike]
    return small if small and _cost(config, small) < _cost(config, wholes) else wholes


def _cost(config: RunConfig, designs: Sequence[Planned]) -> float:
    """Processor time of simulations, in layers that are compiled; what several designs have in common counts once.

    As measured on Llama 3 8B, Llama 2 70B and MindSpore 2.10: a simulation without layers, another stage of its pipeline, a layer
    that is scheduled for one micro-batch more, and in such layers what each chunk has of its own. Accumulation steps, without a
    pipeline, are compiled one by one.
    """
    points = {(one.like.likeness, point): one.like for one in designs for point in one.design.points}
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
    return min(exact_stage(target), few, key=lambda design: _cost(config, [_alone(config, design, stage)]))


def _micro_step(config: RunConfig) -> int:
    """Micro-batches of interleaved chunks come in multiples of the number of stages, but in a V, where they do not."""
    in_groups = config.model.config.pp_interleave_num > 1 and not config.parallel.pipeline_config.v_shape
    return config.parallel_config.pipeline_stage if in_groups else 1


def _carry_out(
    config: RunConfig, designs: Sequence[Planned], simulations: Simulations
) -> tuple[list[StageMemory], list[Stage]]:
    """Runs the simulations of all designs together; returns what was found, and the stages whose check disagreed."""
    wanted = [(one.like, point) for one in designs for point in one.design.points]
    profiles = iter(simulations.profiles([_request(config, like, point) for like, point in wanted]))
    found: list[StageMemory] = []
    failed: list[Stage] = []
    for one in designs:
        mine = {point: next(profiles) for point in one.design.points}
        checked = _checked(one.design, mine)
        reliable = _reliable(one.design, mine, checked)
        for stage, target in one.targets:
            if reliable is None or not _understood(target, one.design, mine, checked, reliable):
                failed.append(stage)
            else:
                found.append(_extrapolated(target, stage, one.design, mine, reliable))
    return found, failed


def _request(config: RunConfig, like: Stage, point: Point) -> Request:
    reduced, rank = reduce_to_stage(config, like, point)
    layers = "+".join(map(str, point.layers))
    return Request(reduced, rank, f"stage {like.number} with {layers} layers, {point.micro_batches} micro-batches")


def _moments(profiles: Mapping[Point, Profile]) -> dict[Point, Moments]:
    return {point: profile.moments for point, profile in profiles.items()}


@dataclass(frozen=True)
class Checked:
    """What is said of the checking simulation, or the one nearest to it, and what it says itself.

    Attributes:
        by_chance: the same where what not all simulations have is taken to be there by chance.
    """

    said: Moments
    by_chance: Moments
    seen: Profile

    @cached_property
    def tolerance(self) -> float:
        """Bytes."""
        return TOLERANCE * max(map(own_bytes_of, self.seen.moments.values())) + TOLERATED_BYTES

    def right(self, kind: str, name: str) -> bool:
        """Whether what is said of moments of ``name`` is what is seen of those of ``kind``."""
        difference = own_bytes_of(self.said.get(name, {})) - own_bytes_of(self.seen.moments[kind])
        return abs(difference) <= self.tolerance


def _checked(design: Design, profiles: Mapping[Point, Profile]) -> Checked:
    if design.check:
        said, by_chance = (design.predict(design.check, _moments(profiles), growing) for growing in (True, False))
        return Checked(said, by_chance, profiles[design.check])
    fewer, more = design.passing or (design.base, design.base)
    return Checked(profiles[fewer].moments, profiles[fewer].moments, profiles[more])


def _reliable(design: Design, profiles: Mapping[Point, Profile], checked: Checked) -> set[str] | None:
    """The kinds of moments that were extrapolated right for the checking simulation; None if its peak was not.

    Without one, micro-batches are all that is extrapolated, and they should matter next to nothing: a moment that they add more
    than that to is not.
    """
    sizes = {kind: own_bytes_of(fill) for kind, fill in checked.seen.moments.items()}
    right = {kind for kind in sizes if checked.right(kind, kind)}
    if max((sizes[kind] for kind in right), default=0) < max(sizes.values()) - checked.tolerance:
        return None
    return right if design.check else right | (set(profiles[design.base].moments) - set(sizes))


def _understood(
    target: Point, design: Design, profiles: Mapping[Point, Profile], checked: Checked, right: Set[str]
) -> bool:
    """Whether no moment that was extrapolated wrong can be the peak at ``target``.

    Of such a moment, what not all simulations have is taken to be there by chance. What it had more than was said then grows,
    at most, as :func:`_grown` says; of one that had less, what is said is enough. Next to the peak there are moments that have
    but a scalar more, which is no other figure. Where nothing was said of a moment, it must be far below the peak, or what was
    said of it as of a stage with recomputed layers must be right: so MindSpore names there what all layers' gradients exchange.
    """
    if design.check is None:
        base = profiles[design.base]
        near = {kind for kind, fill in base.moments.items() if own_bytes_of(fill) >= NEAR * own_bytes_of(base.peak)}
        return near <= right
    seen = checked.seen
    sure, there = (design.predict(target, _moments(profiles), growing) for growing in (True, False))
    peak = max(own_bytes_of(sure[kind]) for kind in right)
    for kind, fill in seen.moments.items():
        if kind in right:
            continue
        if kind not in there:
            other = kind.replace(*AS_RECOMPUTED)
            told = other in there and checked.right(kind, other) and own_bytes_of(sure[other]) <= peak
            if not told and own_bytes_of(fill) >= NEAR * own_bytes_of(seen.peak):
                return False
            continue
        farther = _distance(design.base, target) / _distance(design.base, design.check)
        grown = _grown(fill, checked.by_chance[kind], farther, design.alive)
        if own_bytes_of(there[kind]) + grown > peak + TOLERATED_BYTES:
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


def _distance(base: Point, point: Point) -> int:
    return sum(point.layers) - sum(base.layers) + point.alive - base.alive


def _extrapolated(
    target: Point, stage: Stage, design: Design, profiles: Mapping[Point, Profile], reliable: Set[str]
) -> StageMemory:
    if target in profiles:
        profile = profiles[target]
        return _as_simulated(stage, profile)
    moments = {kind: fill for kind, fill in design.predict(target, _moments(profiles)).items() if kind in reliable}
    used = bytes_of(fullest(moments))
    gaps = max(profile.gaps for profile in profiles.values())
    largest = profiles[design.check or design.base]
    what = f"{len(profiles)} smaller runs" if design.varied or design.alive else "fewer micro-batches"
    method = f"extrapolated: {what}"
    return StageMemory(stage, moments, used + gaps, method, largest, False, _planned(design, target, profiles))


def _planned(design: Design, target: Point, profiles: Mapping[Point, Profile]) -> Fill:
    """What lies in planned memory, from smaller runs. Where their fullest moments differ, some would be less than nothing."""
    fills = {point: {SOMAS: profile.planned} for point, profile in profiles.items()}
    return {use: size for use, size in design.predict(target, fills)[SOMAS].items() if size > 0}


def _as_simulated(stage: Stage, profile: Profile) -> StageMemory:
    return StageMemory(stage, profile.moments, profile.actual_peak, "simulated", profile, True, profile.planned)
