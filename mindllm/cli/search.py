"""What ``mindllm search`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from mindllm.cli.parsers.search import make_parser
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.config.shorten import own_bases, write_short
from mindllm.console import error_console, output, print_json, styled
from mindllm.errors import CheckFailed
from mindllm.files import atomic_open
from mindllm.strategies.page import render_page
from mindllm.strategies.search import Found, Planned, own, plan_best, search
from mindllm.tables import Table, figures, texts
from mindllm.timing.device import read_device
from mindllm.timing.stage_times import mean_stage
from mindllm.timing.step import StepTime
from mindllm.timing.verdict import implausible, memory_limit
from mindllm.units import GIB

PAGE = "strategies.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, shows and writes; returns 0 when a strategy fits."""
    options, overrides = make_parser().parse_known_args(arguments)
    config, device = load_config(options.config, overrides), read_device(options.device)
    devices = options.devices or config.parallel_config.device_num
    batch = options.global_batch or config.global_batch_size
    limit = memory_limit(config, device)
    Path(options.output).mkdir(parents=True, exist_ok=True)
    same = (config.parallel_config.device_num, config.global_batch_size) == (devices, batch)
    hand = own(config, device) if same else None
    found = search(config, devices, batch, device, limit, Path(options.output))
    if not found.judged:
        raise CheckFailed(f"none of {found.tried} strategies fits {limit / GIB:g} GB; {_reasons(found)}")
    best = plan_best(config, found.judged, device, limit, options.best, options.seconds)
    if options.dry_run:
        from mindllm.strategies.confirm import held_to_dry_run, simulated

        best = held_to_dry_run(config, best[: options.dry_run], device, limit, options.seconds)
        if hand and hand.room(limit).fits:
            hand = simulated(hand)
    if not best:
        raise CheckFailed("none of the best strategies fits when its layers are planned; give more --best or --seconds")
    title = f"{config.trainer.model_name or options.config} on {devices} devices, {batch} sequences a step"
    with atomic_open(Path(options.output) / PAGE) as page:
        page.write(render_page(title, found.judged, limit, hand))
    chosen = recommended(best, hand, limit)
    if options.json:
        print_json({
            "best": [_tree(one, limit) for one in best], "yaml": _tree(hand, limit) if hand else None,
            "recommended": "yaml" if chosen is hand else "best 1", "left_out": found.left_out,
        })  # fmt: skip
    else:
        _show(title, found, best, hand, limit)
        output.print(f"{Path(options.output) / PAGE}: memory and speed of all")
    if options.apply:
        write_short(chosen.config, options.apply, own_bases(chosen.config))
        error_console.print(
            f"wrote {options.apply}: {'the YAML as it is' if chosen is hand else chosen.candidate.name}"
        )
    return 0


def recommended(best: Sequence[Planned], hand: Planned | None, limit: float) -> Planned:
    """The fastest that fits; of equal ones the YAML as it is."""
    if hand and hand.room(limit).fits and hand.step.seconds <= best[0].step.seconds:
        return hand
    return best[0]


def _show(title: str, found: Found, best: Sequence[Planned], hand: Planned | None, limit: float) -> None:
    rows = [_row(str(number), one, limit) for number, one in enumerate(best, 1)]
    if hand:
        rows.append(_row("YAML", hand, limit))
    columns = [*texts("rank", "strategy"), *figures("s", "tokens/s/device", "GB of each stage"), *texts("fits")]
    output.print(Table(title, columns, rows, keys=2))
    if hand:
        for line in compared(best[0], hand, limit):
            output.print(line)
        places = [number for number, one in enumerate(found.judged, 1) if one.candidate == hand.candidate]
        where = f"number {places[0]} of {len(found.judged)}" if places else "not among those that fit"
        output.print(f"the YAML's strategy, with layers recomputed until it fits: {where}")
        output.print(differences(best[0].step, hand.step))
    for one, name in ((best[0], "the best"), *(((hand, "the YAML's"),) if hand else ())):
        if doubt := implausible(one.step.utilisation):
            output.print(styled((f"implausible: {name} {doubt}", "bold red")))
    output.print(
        f"{found.tried} strategies, {found.kept} known from before, {len(found.judged)} fit; {_reasons(found)}"
    )
    if uncounted := best[0].step.uncounted:
        output.print(f"not counted: {'; '.join(uncounted)}")


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


if __name__ == "__main__":
    run_command(main)
