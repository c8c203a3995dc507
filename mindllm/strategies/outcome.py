"""Run a search: the best strategies next to the YAML as it is, the recommendation and its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from mindllm.architecture.experts import DISPATCHES, PLACES
from mindllm.architecture.layer_counts import ONE_F_ONE_B, SEARCHED
from mindllm.config import RunConfig
from mindllm.config.checks.mesh import COMPILED, compiles_for
from mindllm.config.reading.shorten import source_bases, write_short
from mindllm.errors import CheckFailed, Problem, UserError, nearest
from mindllm.files import atomic_open
from mindllm.results import Result
from mindllm.strategies.candidates import Candidate
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.strategies.dispatch import (
    check_forms,
    computes_the_same,
    describe_changes,
    dispatch_changes,
)
from mindllm.strategies.listing import AS_WRITTEN, Entry, list_strategies, write_csv
from mindllm.strategies.low_utilisation import explain_utilisation, utilisation_causes
from mindllm.strategies.page import render_page
from mindllm.strategies.search import UNPLANNED, Planned, SearchResult, evaluate_current, plan_best, search
from mindllm.terminal.page import beside_proof
from mindllm.terminal.progress import Progress, unwatched
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled
from mindllm.timing.device import Device
from mindllm.timing.stage_times import mean_stage
from mindllm.timing.step import StepTime
from mindllm.timing.verdict import implausible, limit_text, memory_limit
from mindllm.units import DEVICE_GB, GIB, counted

if TYPE_CHECKING:
    from mindllm.results import Part

PAGE = "strategies.html"
NOT_IN_DRY_RUN = "does not fit in the dry run"


@dataclass(frozen=True)
class Wanted:
    """Options of a search.

    Attributes:
        devices: number of devices; None: those of the run.
        global_batch: sequences of a step; None: those of the run.
        best: number of strategies that are planned and shown.
        seconds: for each plan.
        dry_run: number of the best strategies that are validated by MindSpore's dry run.
        constraints: limits that apply whatever a strategy would gain.
        schedules: orders of micro-batches to try, of ``SEARCHED``; empty: 1F1B, and that of the run.
    """

    devices: int | None = None
    global_batch: int | None = None
    best: int = 5
    seconds: float = 5.0
    dry_run: int | None = None
    constraints: Constraints = UNLIMITED
    schedules: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Strategies(Result):
    """The strategies of a run, the fastest first; sizes are bytes.

    Attributes:
        title: the run, its devices and its batch.
        asked: the run.
        found: every candidate that fits by formula, and the counts of the excluded ones.
        best: the best of them, planned.
        hand: the YAML as it is; None if it has other devices or another batch.
        limit: memory of a device.
        others: other planned strategies: not validated by the dry run, or slower than the best.
    """

    title: str
    asked: RunConfig
    found: SearchResult
    best: tuple[Planned, ...]
    hand: Planned | None
    limit: float
    others: tuple[Planned, ...] = ()

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All strategies, the fastest first, and the YAML as it is: the list that every report shows."""
        return list_strategies(self.found.judged, (*self.best, *self.others), self.hand, self.limit)

    @property
    def recommended(self) -> Planned:
        """The fastest that fits; of equal ones the YAML as it is."""
        return recommended(self.best, self.hand, self.limit)

    @property
    def config(self) -> RunConfig:
        """The recommended run."""
        return self.recommended.config

    @property
    def recommended_name(self) -> str:
        """The recommended strategy in words."""
        chosen = self.recommended
        return "the YAML as it is" if chosen is self.hand else chosen.candidate.name

    def write(self, path: Path | str) -> None:
        """Write the recommended run as a YAML of differences to the original run."""
        write_short(self.config, Path(path), source_bases(self.config))

    def write_page(self, path: Path | str) -> None:
        """Write a page with memory and speed of all strategies that fit."""
        with atomic_open(path) as page:
            page.write(self.render_page(beside_proof(Path(path).parent)))

    def render_page(self, to_proof: bool = False) -> str:
        """Return the page as HTML; ``to_proof`` adds a link to the proof of the run."""
        return render_page(self.title, self.entries, self.limit, to_proof)

    def write_csv(self, path: Path | str) -> None:
        """Write all strategies as CSV, the fastest first."""
        write_csv(self.entries, Path(path))

    def summary(self) -> str:
        """Return the recommended strategy and its step."""
        return f"{self.recommended_name}, {self.recommended.step.seconds:.2f} s a step"

    def tree(self) -> dict[str, Any]:
        """Return the output of ``--json``, in seconds and bytes."""
        changes = dispatch_changes(self.asked, self.config)
        return {
            "best": [_tree(planned, self.limit) for planned in self.best],
            "yaml": _tree(self.hand, self.limit) if self.hand else None,
            "recommended": "yaml" if self.recommended is self.hand else "best 1",
            "dispatch_changes": {key: list(values) for key, values in changes.items()},
            "computes_the_same": computes_the_same(self.asked, self.config),
            "left_out": self.found.excluded,
            "candidates": [{"rank": rank, **planned.tree()} for rank, planned in enumerate(self.entries, 1)],
        }

    def parts(self) -> Iterator[Part]:
        """Yield the best next to the YAML, their gains, doubts, and the excluded strategies."""
        best, hand, result = self.best, self.hand, self.found
        rows = [_row(str(number), planned, self.limit) for number, planned in enumerate(best, 1)]
        rows += [_row("YAML", hand, self.limit)] if hand else []
        columns = [
            *texts("rank", "strategy"),
            *figures("step s", "tokens/s/device", "GB of each stage"),
            *texts("fits"),
        ]
        yield Table(self.title, columns, rows, keys=2)
        if hand:
            yield from compared(best[0], hand, self.limit)
            yield self._rank_of_yaml(hand)
            yield differences(best[0].step, hand.step)
        yield from self.dispatch_lines()
        for planned, name in ((best[0], "the best"), *(((hand, "the YAML"),) if hand else ())):
            yield from explain_utilisation(planned.step, name)
            if doubt := implausible(planned.step.utilisation):
                yield styled((f"implausible: {name}: {doubt}", "bold red"))
        yield (
            f"{result.tried} strategies, {result.reused} known from before, {len(result.judged)} fit; {_reasons(result)}"
        )
        yield f"memory {best[0].source}, {DEVICE_GB}: {limit_text(self.limit, best[0].room(self.limit).reserved)}"
        if uncounted := best[0].step.uncounted:
            yield f"not counted: {'; '.join(uncounted)}"

    def _rank_of_yaml(self, hand: Planned) -> str:
        """Return the rank of the YAML's strategy in the list, without the YAML as it is."""
        strategies = [entry for entry in self.entries if entry.source != AS_WRITTEN]
        places = [number for number, entry in enumerate(strategies, 1) if entry.candidate == hand.candidate]
        where = f"number {places[0]} of {len(strategies)}" if places else "not among those that were tried and fit"
        return f"the YAML's strategy, with layers recomputed until it fits: {where}"

    def dispatch_lines(self) -> Iterator[str]:
        """Yield changes of the dispatch of experts, or the capacity that excludes other forms."""
        model = self.asked.model.config
        if changes := list(describe_changes(self.asked, self.config)):
            yield from changes
        elif model.capacity_factor is not None and all(
            entry.candidate.dispatch.form == PLACES for entry in self.entries
        ):
            other_forms = " ".join(form for form in DISPATCHES if form != PLACES)
            yield (
                f"capacity_factor {model.capacity_factor:g} is kept, because it decides which tokens are dropped; "
                f"--dispatch {other_forms} tries experts that drop no token"
            )


def find_strategies(
    config: RunConfig,
    device: Device,
    options: Wanted,
    directory: Path | None = None,
    progress: Progress = unwatched,
) -> Strategies:
    """Search, plan the best strategies, and validate them by a dry run if requested.

    With a ``directory`` progress is stored there, and an interrupted search is resumed.

    Raises:
        CheckFailed: nothing fits.
        UserError: the run has an unsupported feature, or MindSpore does not compile for this number of devices.
    """
    devices = options.devices or config.parallel_config.device_num
    batch = options.global_batch or config.global_batch_size
    _check_options(config, options, devices)
    limit, constraints = memory_limit(config, device), options.constraints
    same_size = (config.parallel_config.device_num, config.global_batch_size) == (devices, batch)
    hand = evaluate_current(config, device) if same_size else None
    if hand and not constraints.admit(config, hand.candidate):
        hand = None
    scheduler = config.parallel.pipeline_config.pipeline_scheduler
    usual = tuple(one for one in SEARCHED if one in (ONE_F_ONE_B, scheduler))
    result = search(config, devices, batch, device, limit, directory, progress, constraints, options.schedules or usual)
    if not result.judged:
        raise CheckFailed(f"none of {result.tried} strategies fits {limit / GIB:g} GB; {_reasons(result)}")
    refused: dict[Candidate, str] = {}
    planned = plan_best(
        config, result.judged, device, limit, options.best, options.seconds, progress, constraints, refused.__setitem__
    )
    best, remaining = planned[: options.best], planned[options.best :]
    if best:
        _demand_speed(recommended(best, hand, limit), devices, constraints)
    if options.dry_run:
        from mindllm.strategies.confirm import simulated, validate_by_dry_run

        first, remaining = planned[: options.dry_run], planned[options.dry_run :]
        best = validate_by_dry_run(config, first, device, limit, options.seconds, progress, constraints)
        refused |= dict.fromkeys({one.candidate for one in first} - {one.candidate for one in best}, NOT_IN_DRY_RUN)
        hand = simulated(hand, progress) if hand and max(hand.memory) <= limit else hand
    if not best:
        refusals = [reason for reason in refused.values() if reason not in (UNPLANNED, NOT_IN_DRY_RUN)]
        why = f"can be planned; of the first: {refusals[0]}" if refusals else "fits when its layers are planned"
        raise CheckFailed(f"none of the best strategies {why}; give more --best or --seconds")
    _demand_speed(recommended(best, hand, limit), devices, constraints)
    name = config.trainer.model_name or config.source or "run"
    title = f"{name} on {counted(devices, 'device')}, {batch} sequences a step"
    return Strategies(title, config, _without(result, refused), tuple(best), hand, limit, tuple(remaining))


def _check_options(config: RunConfig, options: Wanted, devices: int) -> None:
    """Raise UserError for an unknown order or dispatch, or if MindSpore does not compile for this number of devices."""
    if unknown := [schedule for schedule in options.schedules if schedule not in SEARCHED]:
        message = f"no such order of micro-batches (value {unknown[0]!r}){nearest(unknown[0], SEARCHED)}"
        raise UserError.of(Problem(None, ("schedules",), message, unknown[0]))
    check_forms(config, options.constraints.dispatch)
    if config.context.device_target == "Ascend" and not compiles_for(devices, 1):
        raise UserError(f"{devices} devices: {COMPILED}; take one of these")


def _without(result: SearchResult, refused: Mapping[Candidate, str]) -> SearchResult:
    """Return the results without the strategies that could not be planned, which are counted by reason."""
    reasons = (
        reason if reason in (UNPLANNED, NOT_IN_DRY_RUN) else "its plan cannot be written as a run"
        for reason in refused.values()
    )
    judged = tuple(judged for judged in result.judged if judged.candidate not in refused)
    return replace(result, judged=judged, excluded=result.excluded + Counter(reasons))


def _demand_speed(fastest: Planned, devices: int, constraints: Constraints) -> None:
    """Raise CheckFailed if the fastest strategy is slower than required."""
    least, speed = constraints.tokens_per_second, fastest.step.tokens_per_device * devices
    if least is not None and speed < least:
        raise CheckFailed(
            f"{devices} devices train at most {speed:,.0f} tokens a second, as predicted of {fastest.candidate.name}; "
            f"{least:,.0f} are required"
        )


def recommended(best: Sequence[Planned], hand: Planned | None, limit: float) -> Planned:
    """Return the fastest strategy that fits; if equal, the YAML as it is."""
    if hand and hand.room(limit).fits and hand.step.seconds <= best[0].step.seconds:
        return hand
    return best[0]


def compared(best: Planned, hand: Planned, limit: float) -> list[str | Text]:
    """Return the best next to the YAML as it is, which may not fit; percentages are those of the table."""
    gain, memory = shown_gain(best, hand), hand.room(limit)
    if memory.fits:
        better = "no better than the YAML's, which fits: that is the best here"
        return [f"best: {f'{gain:.1%} above the YAML' if gain > 0 else better}"]
    difference = f"{gain:.1%} above" if gain > 0 else f"{-gain:.1%} below"
    warning = styled((f"the YAML as it is does not fit: it {memory}, {hand.source}", "bold red"))
    return [warning, f"best of those that fit: {best.candidate.name}, {difference} the YAML's speed"]


def shown_gain(best: Planned, hand: Planned) -> float:
    """Return the gain in tokens of ``best``, from the displayed figures: whole tokens per second and device."""
    figures = [round(planned.step.tokens_per_device) for planned in (best, hand)]
    if min(figures) == 0:  # very slow runs show no figure to compare
        return best.step.tokens_per_device / hand.step.tokens_per_device - 1
    return figures[0] / figures[1] - 1


def differences(best: StepTime, hand: StepTime) -> Table:
    """Return the seconds of a step by cause, mean of the stages; gains are differences of displayed figures."""
    spent = [mean_stage(step) for step in (best, hand)]
    rows = []
    for name in dict.fromkeys((*spent[1], *spent[0])):
        new, former = (round(part.get(name, 0.0), 2) for part in spent)
        rows.append((name, f"{new:.2f}", f"{former:.2f}", f"{former - new:+.2f}"))
    return Table("where the best gains, s", [*texts("spent on"), *figures("best", "YAML", "gained")], rows)


def _row(rank: str, planned: Planned, limit: float) -> tuple[str, ...]:
    memory, room = " ".join(f"{size / GIB:.0f}" for size in planned.memory), planned.room(limit)
    fits = "yes" if room.fits else f"no: {room.missing / GIB:.1f} GB over on stage {room.stage}"
    return (
        rank,
        planned.candidate.name,
        f"{planned.step.seconds:.2f}",
        f"{planned.step.tokens_per_device:,.0f}",
        memory,
        fits,
    )


def _reasons(result: SearchResult) -> str:
    return "; ".join(f"left out {count}: {reason}" for reason, count in result.excluded.most_common())


def _tree(planned: Planned, limit: float) -> dict[str, Any]:
    return {
        "strategy": planned.candidate.tree(),
        "seconds": planned.step.seconds,
        "tokens_per_second_per_device": planned.step.tokens_per_device,
        "model_flops_utilisation": planned.step.utilisation,
        "implausible": implausible(planned.step.utilisation),
        "low_utilisation": utilisation_causes(planned.step),
        "memory": list(planned.memory),
        **planned.room(limit).tree(),
    }
