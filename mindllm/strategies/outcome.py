"""A search from its run to its answer: the best strategies beside the YAML as it is, which of them to take, and why."""

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
from mindllm.strategies.search import NO_PLAN, Found, Planned, own, plan_best, search
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
    """What is searched for.

    Attributes:
        devices: how many; None: the run's.
        global_batch: sequences of a step; None: the run's.
        best: how many of the best are planned and shown.
        seconds: for each plan.
        dry_run: how many of the best are held to MindSpore's dry run.
        constraints: what is not wanted, whatever it would gain.
        schedules: orders of micro-batches that are tried, of ``SEARCHED``; empty: 1F1B, and the one that the run has.
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
        asked: the run whose strategies they are.
        found: every candidate that fits, by formula, and why others were left out.
        best: the best of them, planned.
        hand: the YAML as it is; None where it has other devices or another batch.
        limit: of the memory of a device.
        others: those that were planned as well and are not among the best: not held to the dry run, or slower.
    """

    title: str
    asked: RunConfig
    found: Found
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
        """Write the recommended run as a YAML: what differs from the one it was searched for."""
        write_short(self.config, Path(path), source_bases(self.config))

    def write_page(self, path: Path | str) -> None:
        """Write a page with memory and speed of all that fit."""
        with atomic_open(path) as page:
            page.write(self.render_page(beside_proof(Path(path).parent)))

    def render_page(self, to_proof: bool = False) -> str:
        """Return that page as HTML; ``to_proof``: with the way back to the proof of the run beside it."""
        return render_page(self.title, self.entries, self.limit, to_proof)

    def write_csv(self, path: Path | str) -> None:
        """Write all strategies as CSV, the fastest first."""
        write_csv(self.entries, Path(path))

    def summary(self) -> str:
        """Return the recommended strategy and its step."""
        return f"{self.recommended_name}, {self.recommended.step.seconds:.2f} s a step"

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints, in seconds and bytes."""
        changes = dispatch_changes(self.asked, self.config)
        return {
            "best": [_tree(one, self.limit) for one in self.best],
            "yaml": _tree(self.hand, self.limit) if self.hand else None,
            "recommended": "yaml" if self.recommended is self.hand else "best 1",
            "dispatch_changes": {key: list(values) for key, values in changes.items()},
            "computes_the_same": computes_the_same(self.asked, self.config),
            "left_out": self.found.left_out,
            "candidates": [{"rank": rank, **one.tree()} for rank, one in enumerate(self.entries, 1)],
        }

    def parts(self) -> Iterator[Part]:
        """Yield the best next to the YAML, where they gain, what is doubtful, and what was left out."""
        best, hand, found = self.best, self.hand, self.found
        rows = [_row(str(number), one, self.limit) for number, one in enumerate(best, 1)]
        rows += [_row("YAML", hand, self.limit)] if hand else []
        columns = [
            *texts("rank", "strategy"),
            *figures("step s", "tokens/s/device", "GB of each stage"),
            *texts("fits"),
        ]
        yield Table(self.title, columns, rows, keys=2)
        if hand:
            yield from compared(best[0], hand, self.limit)
            yield self._place_of_hand(hand)
            yield differences(best[0].step, hand.step)
        yield from self.dispatch_lines()
        for one, name in ((best[0], "the best"), *(((hand, "the YAML"),) if hand else ())):
            yield from explain_utilisation(one.step, name)
            if doubt := implausible(one.step.utilisation):
                yield styled((f"implausible: {name}: {doubt}", "bold red"))
        yield (f"{found.tried} strategies, {found.kept} known from before, {len(found.judged)} fit; {_reasons(found)}")
        yield f"memory {best[0].source}, {DEVICE_GB}: {limit_text(self.limit, best[0].room(self.limit).reserved)}"
        if uncounted := best[0].step.uncounted:
            yield f"not counted: {'; '.join(uncounted)}"

    def _place_of_hand(self, hand: Planned) -> str:
        """Return the rank of the YAML's strategy among all of the list but the YAML as it is."""
        strategies = [one for one in self.entries if one.source != AS_WRITTEN]
        places = [number for number, one in enumerate(strategies, 1) if one.candidate == hand.candidate]
        where = f"number {places[0]} of {len(strategies)}" if places else "not among those that were tried and fit"
        return f"the YAML's strategy, with layers recomputed until it fits: {where}"

    def dispatch_lines(self) -> Iterator[str]:
        """Yield what the recommended run changes in the dispatch of experts, or that a capacity keeps other forms out."""
        model = self.asked.model.config
        if changes := list(describe_changes(self.asked, self.config)):
            yield from changes
        elif model.capacity_factor is not None and all(one.candidate.dispatch.form == PLACES for one in self.entries):
            others = " ".join(form for form in DISPATCHES if form != PLACES)
            yield (
                f"capacity_factor {model.capacity_factor:g} is kept, because it decides which tokens are dropped; "
                f"--dispatch {others} tries experts that drop no token"
            )


def find_strategies(
    config: RunConfig,
    device: Device,
    wanted: Wanted,
    directory: Path | None = None,
    progress: Progress = unwatched,
) -> Strategies:
    """Search, plan the best, and hold them to a dry run if that is wanted.

    With a ``directory`` progress is kept there, and an interrupted search goes on where it was.

    Raises:
        CheckFailed: nothing fits.
        UserError: the run has something that is not modelled, or MindSpore does not compile for so many devices.
    """
    devices = wanted.devices or config.parallel_config.device_num
    batch = wanted.global_batch or config.global_batch_size
    _check_wanted(config, wanted, devices)
    limit, constraints = memory_limit(config, device), wanted.constraints
    same = (config.parallel_config.device_num, config.global_batch_size) == (devices, batch)
    hand = own(config, device) if same else None
    if hand and not constraints.admit(config, hand.candidate):
        hand = None
    scheduler = config.parallel.pipeline_config.pipeline_scheduler
    usual = tuple(one for one in SEARCHED if one in (ONE_F_ONE_B, scheduler))
    found = search(config, devices, batch, device, limit, directory, progress, constraints, wanted.schedules or usual)
    if not found.judged:
        raise CheckFailed(f"none of {found.tried} strategies fits {limit / GIB:g} GB; {_reasons(found)}")
    refused: dict[Candidate, str] = {}
    planned = plan_best(
        config, found.judged, device, limit, wanted.best, wanted.seconds, progress, constraints, refused.__setitem__
    )
    best, others = planned[: wanted.best], planned[wanted.best :]
    if best:
        _demand_speed(recommended(best, hand, limit), devices, constraints)
    if wanted.dry_run:
        from mindllm.strategies.confirm import held_to_dry_run, simulated

        first, others = planned[: wanted.dry_run], planned[wanted.dry_run :]
        best = held_to_dry_run(config, first, device, limit, wanted.seconds, progress, constraints)
        refused |= dict.fromkeys({one.candidate for one in first} - {one.candidate for one in best}, NOT_IN_DRY_RUN)
        hand = simulated(hand, progress) if hand and max(hand.memory) <= limit else hand
    if not best:
        refusals = [reason for reason in refused.values() if reason not in (NO_PLAN, NOT_IN_DRY_RUN)]
        why = f"can be planned; of the first: {refusals[0]}" if refusals else "fits when its layers are planned"
        raise CheckFailed(f"none of the best strategies {why}; give more --best or --seconds")
    _demand_speed(recommended(best, hand, limit), devices, constraints)
    name = config.trainer.model_name or config.source or "run"
    title = f"{name} on {counted(devices, 'device')}, {batch} sequences a step"
    return Strategies(title, config, _without(found, refused), tuple(best), hand, limit, tuple(others))


def _check_wanted(config: RunConfig, wanted: Wanted, devices: int) -> None:
    """Raise UserError for an order or a dispatch that does not exist, or if MindSpore does not compile for so many devices."""
    if unknown := [one for one in wanted.schedules if one not in SEARCHED]:
        message = f"no such order of micro-batches (value {unknown[0]!r}){nearest(unknown[0], SEARCHED)}"
        raise UserError.of(Problem(None, ("schedules",), message, unknown[0]))
    check_forms(config, wanted.constraints.dispatch)
    if config.context.device_target == "Ascend" and not compiles_for(devices, 1):
        raise UserError(f"{devices} devices: {COMPILED}; take one of these")


def _without(found: Found, refused: Mapping[Candidate, str]) -> Found:
    """Return what was found without the strategies that could not be planned, which are counted by reason."""
    reasons = (
        reason if reason in (NO_PLAN, NOT_IN_DRY_RUN) else "its plan cannot be written as a run"
        for reason in refused.values()
    )
    judged = tuple(one for one in found.judged if one.candidate not in refused)
    return replace(found, judged=judged, left_out=found.left_out + Counter(reasons))


def _demand_speed(fastest: Planned, devices: int, constraints: Constraints) -> None:
    """Raise CheckFailed where the fastest strategy is slower than required."""
    least, speed = constraints.tokens_per_second, fastest.step.tokens_per_device * devices
    if least is not None and speed < least:
        raise CheckFailed(
            f"{devices} devices train at most {speed:,.0f} tokens a second, as predicted of {fastest.candidate.name}; "
            f"{least:,.0f} were wanted"
        )


def recommended(best: Sequence[Planned], hand: Planned | None, limit: float) -> Planned:
    """The fastest that fits; of equal ones the YAML as it is."""
    if hand and hand.room(limit).fits and hand.step.seconds <= best[0].step.seconds:
        return hand
    return best[0]


def compared(best: Planned, hand: Planned, limit: float) -> list[str | Text]:
    """Return the best next to the YAML as it is, which may not fit; the percentage is that of the figures in the table."""
    gain, memory = shown_gain(best, hand), hand.room(limit)
    if memory.fits:
        better = "no better than the YAML's, which fits: that is the best here"
        return [f"best: {f'{gain:.1%} above the YAML' if gain > 0 else better}"]
    difference = f"{gain:.1%} above" if gain > 0 else f"{-gain:.1%} below"
    told = styled((f"the YAML as it is does not fit: it {memory}, {hand.source}", "bold red"))
    return [told, f"best of those that fit: {best.candidate.name}, {difference} what the YAML would do if it did"]


def shown_gain(best: Planned, hand: Planned) -> float:
    """Return by what share ``best`` trains more tokens, of the figures that are shown: whole tokens a second and device."""
    figures = [round(one.step.tokens_per_device) for one in (best, hand)]
    if min(figures) == 0:  # very slow runs show no figure to compare
        return best.step.tokens_per_device / hand.step.tokens_per_device - 1
    return figures[0] / figures[1] - 1


def differences(best: StepTime, hand: StepTime) -> Table:
    """Return the seconds of a step by what they are spent on, mean of the stages; gains are differences of shown figures."""
    spent = [mean_stage(step) for step in (best, hand)]
    rows = []
    for name in dict.fromkeys((*spent[1], *spent[0])):
        new, former = (round(part.get(name, 0.0), 2) for part in spent)
        rows.append((name, f"{new:.2f}", f"{former:.2f}", f"{former - new:+.2f}"))
    return Table("where the best gains, s", [*texts("spent on"), *figures("best", "YAML", "gained")], rows)


def _row(rank: str, one: Planned, limit: float) -> tuple[str, ...]:
    memory, room = " ".join(f"{size / GIB:.0f}" for size in one.memory), one.room(limit)
    fits = "yes" if room.fits else f"no: {room.missing / GIB:.1f} GB over on stage {room.stage}"
    return rank, one.candidate.name, f"{one.step.seconds:.2f}", f"{one.step.tokens_per_device:,.0f}", memory, fits


def _reasons(found: Found) -> str:
    return "; ".join(f"left out {count}: {reason}" for reason, count in found.left_out.most_common())


def _tree(one: Planned, limit: float) -> dict[str, Any]:
    return {
        "strategy": one.candidate.tree(),
        "seconds": one.step.seconds,
        "tokens_per_second_per_device": one.step.tokens_per_device,
        "model_flops_utilisation": one.step.utilisation,
        "implausible": implausible(one.step.utilisation),
        "low_utilisation": utilisation_causes(one.step),
        "memory": list(one.memory),
        **one.room(limit).tree(),
    }
