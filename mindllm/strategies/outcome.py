"""A search from its run to its answer: the best strategies beside the YAML as it is, which of them to take, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from mindllm.architecture.layer_counts import ONE_F_ONE_B, SEARCHED
from mindllm.config import RunConfig
from mindllm.config.checks.mesh import COMPILED, compiles_for
from mindllm.config.reading.shorten import own_bases, write_short
from mindllm.errors import CheckFailed, Problem, UserError, nearest
from mindllm.files import atomic_open
from mindllm.results import Result
from mindllm.strategies.candidates import Candidate
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.strategies.page import render_page
from mindllm.strategies.search import Found, Planned, own, plan_best, search
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
PLANNED_FASTER = 1.3  # times as fast as an even split, at most, is a plan: below that nothing is planned


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
        found: every candidate that fits, by formula, and why others were left out.
        best: the best of them, planned.
        hand: the YAML as it is; None where it has other devices or another batch.
        limit: of the memory of a device.
    """

    title: str
    found: Found
    best: tuple[Planned, ...]
    hand: Planned | None
    limit: float

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
        write_short(self.config, Path(path), own_bases(self.config))

    def write_page(self, path: Path | str) -> None:
        """Write a page with memory and speed of all that fit."""
        with atomic_open(path) as page:
            page.write(self.render_page(beside_proof(Path(path).parent)))

    def render_page(self, to_proof: bool = False) -> str:
        """Return that page as HTML; ``to_proof``: with the way back to the proof of the run beside it."""
        return render_page(self.title, self.found.judged, self.limit, self.hand, to_proof)

    def summary(self) -> str:
        """Return the recommended strategy and its step."""
        return f"{self.recommended_name}, {self.recommended.step.seconds:.2f} s a step"

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints, in seconds and bytes."""
        return {
            "best": [_tree(one, self.limit) for one in self.best],
            "yaml": _tree(self.hand, self.limit) if self.hand else None,
            "recommended": "yaml" if self.recommended is self.hand else "best 1",
            "left_out": self.found.left_out,
        }

    def parts(self) -> Iterator[Part]:
        """Yield the best beside the YAML, where they gain, what is doubtful, and what was left out."""
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
            places = [number for number, one in enumerate(found.judged, 1) if one.candidate == hand.candidate]
            where = f"number {places[0]} of {len(found.judged)}" if places else "not among those that fit"
            yield f"the YAML's strategy, with layers recomputed until it fits: {where}"
            yield differences(best[0].step, hand.step)
        for one, name in ((best[0], "the best"), *(((hand, "the YAML's"),) if hand else ())):
            if doubt := implausible(one.step.utilisation):
                yield styled((f"implausible: {name} {doubt}", "bold red"))
        yield (f"{found.tried} strategies, {found.kept} known from before, {len(found.judged)} fit; {_reasons(found)}")
        yield f"memory {best[0].source}, {DEVICE_GB}: {limit_text(self.limit, best[0].room(self.limit).reserved)}"
        if uncounted := best[0].step.uncounted:
            yield f"not counted: {'; '.join(uncounted)}"


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
    if unknown := [one for one in wanted.schedules if one not in SEARCHED]:
        message = f"no such order of micro-batches (value {unknown[0]!r}){nearest(unknown[0], SEARCHED)}"
        raise UserError.of(Problem(None, ("schedules",), message, unknown[0]))
    devices = wanted.devices or config.parallel_config.device_num
    batch = wanted.global_batch or config.global_batch_size
    if config.context.device_target == "Ascend" and not compiles_for(devices, 1):
        raise UserError(f"{devices} devices: {COMPILED}; take one of these")
    limit = memory_limit(config, device)
    same = (config.parallel_config.device_num, config.global_batch_size) == (devices, batch)
    constraints = wanted.constraints
    hand = own(config, device) if same else None
    if hand and not constraints.admit(config, hand.candidate):
        hand = None
    scheduler = config.parallel.pipeline_config.pipeline_scheduler
    usual = tuple(one for one in SEARCHED if one in (ONE_F_ONE_B, scheduler))
    found = search(config, devices, batch, device, limit, directory, progress, constraints, wanted.schedules or usual)
    if not found.judged:
        raise CheckFailed(f"none of {found.tried} strategies fits {limit / GIB:g} GB; {_reasons(found)}")
    _demand_speed(found.judged[0].speed * PLANNED_FASTER, found.judged[0].candidate, devices, constraints)
    refused: list[str] = []
    best = plan_best(
        config, found.judged, device, limit, wanted.best, wanted.seconds, progress, constraints, refused.append
    )
    if wanted.dry_run:
        from mindllm.strategies.confirm import held_to_dry_run, simulated

        best = held_to_dry_run(config, best[: wanted.dry_run], device, limit, wanted.seconds, progress, constraints)
        if hand and max(hand.memory) <= limit:
            hand = simulated(hand, progress)
    if not best:
        why = f"can be planned; of the first: {refused[0]}" if refused else "fits when its layers are planned"
        raise CheckFailed(f"none of the best strategies {why}; give more --best or --seconds")
    _demand_speed(best[0].step.tokens_per_device, best[0].candidate, devices, constraints)
    name = config.trainer.model_name or config.source or "run"
    title = f"{name} on {counted(devices, 'device')}, {batch} sequences a step"
    return Strategies(title, found, tuple(best), hand, limit)


def _demand_speed(of_device: float, fastest: Candidate, devices: int, constraints: Constraints) -> None:
    """Raise CheckFailed where the fastest strategy is slower than was wanted."""
    least, speed = constraints.tokens_per_second, of_device * devices
    if least is not None and speed < least:
        raise CheckFailed(
            f"{devices} devices train at most {speed:,.0f} tokens a second, as predicted of {fastest.name}; {least:,.0f} "
            "were wanted"
        )


def recommended(best: Sequence[Planned], hand: Planned | None, limit: float) -> Planned:
    """The fastest that fits; of equal ones the YAML as it is."""
    if hand and hand.room(limit).fits and hand.step.seconds <= best[0].step.seconds:
        return hand
    return best[0]


def compared(best: Planned, hand: Planned, limit: float) -> list[str | Text]:
    """The best beside the YAML as it is, which may not fit."""
    gain, memory = best.step.tokens_per_device / hand.step.tokens_per_device - 1, hand.room(limit)
    if memory.fits:
        better = "no better than the YAML's, which fits: that is the best here"
        return [f"best: {f'{100 * gain:.1f}% above the YAML' if gain > 0 else better}"]
    difference = f"{100 * gain:.1f}% above" if gain > 0 else f"{-100 * gain:.1f}% below"
    told = styled((f"the YAML as it is does not fit: it {memory}, {hand.source}", "bold red"))
    return [told, f"best of those that fit: {best.candidate.name}, {difference} what the YAML would do if it did"]


def differences(best: StepTime, hand: StepTime) -> Table:
    """What the best saves: seconds of a step by what they are spent on, the mean of the stages."""
    spent = [mean_stage(step) for step in (best, hand)]
    rows = [
        (
            name,
            *(f"{part.get(name, 0.0):.2f}" for part in spent),
            f"{spent[1].get(name, 0.0) - spent[0].get(name, 0.0):+.2f}",
        )
        for name in dict.fromkeys((*spent[1], *spent[0]))
    ]
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
        "memory": list(one.memory),
        **one.room(limit).tree(),
    }
