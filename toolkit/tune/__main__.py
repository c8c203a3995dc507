"""The command line ``python -m toolkit.tune``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_directory, output_file, run_command
from mindllm.config import load_config, render_config
from mindllm.console import error_console, output, print_json
from mindllm.errors import CheckFailed
from mindllm.files import atomic_open
from mindllm.tables import Table, figures, texts
from mindllm.timing.device import DEFAULT, read_device, shipped_devices
from mindllm.timing.step import StepTime
from toolkit.step_time.stage_times import mean_stage
from toolkit.tune.judge import GB
from toolkit.tune.page import render_page
from toolkit.tune.search import Found, Planned, own, plan_best, search

PAGE = "strategies.html"
EXAMPLES = """example:
  python -m toolkit.tune --config configs/llama2/pretrain_llama2_70b_64p.yaml --devices 64
  python -m toolkit.tune --config run.yaml --devices 64 --global_batch 512 --dry_run 3 --apply tuned.yaml
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="python -m toolkit.tune",
        description="The strategies of a run on a number of devices, the fastest first: predicted, the best planned, and the "
        "best of those held to a dry run. An interrupted search goes on where it was. Further options change keys of the "
        "configuration. Exit code 0: found, 3: nothing fits, 2: wrong input.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--config", required=True, metavar="YAML", help="the run")
    parser.add_argument("--devices", type=_positive, metavar="N", help="how many (default: the configuration's)")
    parser.add_argument("--global_batch", type=_positive, metavar="B", help="sequences of a step (default: likewise)")
    names = ", ".join(shipped_devices())
    parser.add_argument(
        "--device", default=DEFAULT, metavar="FILE", help=f"a YAML or one of {names} (default: %(default)s)"
    )
    parser.add_argument(
        "--best", type=_positive, default=5, metavar="K", help="planned and shown (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each plan (default: %(default)s)")
    parser.add_argument(
        "--dry_run",
        type=_positive,
        metavar="K",
        help="of the best ones, simulated by MindSpore's dry run, and planned again where they do not fit",
    )
    parser.add_argument("--apply", type=output_file, metavar="YAML", help="writes the best as a run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument(
        "--output", type=output_directory, default="output_tune", metavar="DIR", help="page and progress (output_tune)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, shows and writes; returns 0 when a strategy fits."""
    options, overrides = make_parser().parse_known_args(arguments)
    config, device = load_config(options.config, overrides), read_device(options.device)
    devices = options.devices or config.parallel_config.device_num
    batch = options.global_batch or config.global_batch_size
    limit = config.context.device_memory
    Path(options.output).mkdir(parents=True, exist_ok=True)
    found = search(config, devices, batch, device, limit, Path(options.output))
    if not found.judged:
        raise CheckFailed(f"none of {found.tried} strategies fits {limit / GB:g} GB; {_reasons(found)}")
    best = plan_best(config, found.judged, device, limit, options.best, options.seconds)
    if options.dry_run:
        from toolkit.tune.confirm import held_to_dry_run

        best = held_to_dry_run(config, best[: options.dry_run], device, limit, options.seconds)
    if not best:
        raise CheckFailed("none of the best strategies fits when its layers are planned; give more --best or --seconds")
    same = (config.parallel_config.device_num, config.global_batch_size) == (devices, batch)
    hand = own(config, device) if same else None
    title = f"{config.trainer.model_name or options.config} on {devices} devices, {batch} sequences a step"
    with atomic_open(Path(options.output) / PAGE) as page:
        page.write(render_page(title, found.judged))
    if options.json:
        print_json(
            {"best": [_tree(one) for one in best], "yaml": _tree(hand) if hand else None, "left_out": found.left_out}
        )
    else:
        _show(title, found, best, hand, Path(options.output))
    if options.apply:
        with atomic_open(options.apply) as file:
            file.write(render_config(best[0].config))
        error_console.print(f"wrote {options.apply}")
    return 0


def _show(title: str, found: Found, best: Sequence[Planned], hand: Planned | None, directory: Path) -> None:
    rows = [_row(str(number), one) for number, one in enumerate(best, 1)]
    if hand:
        rows.append(_row("YAML", hand))
    columns = [*texts("rank", "strategy"), *figures("s", "tokens/s/device", "GB of each stage")]
    output.print(Table(title, columns, rows, keys=2))
    if hand:
        gain = best[0].step.tokens_per_device / hand.step.tokens_per_device - 1
        verdict = (
            f"{100 * gain:.1f}% above the YAML's" if gain > 0 else "no better than the YAML's: that is the best here"
        )
        output.print(f"best: {verdict}")
        places = [number for number, one in enumerate(found.judged, 1) if one.candidate == hand.candidate]
        where = f"number {places[0]} of {len(found.judged)}" if places else "not among those that fit"
        output.print(f"the YAML's strategy, before its layers are planned: {where}")
        output.print(differences(best[0].step, hand.step))
    output.print(
        f"{found.tried} strategies, {found.kept} known from before, {len(found.judged)} fit; {_reasons(found)}"
    )
    if uncounted := best[0].step.uncounted:
        output.print(f"not counted: {'; '.join(uncounted)}")
    output.print(f"{directory / PAGE}: memory and speed of all")


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


def _row(rank: str, one: Planned) -> tuple[str, ...]:
    memory = " ".join(f"{size / GB:.0f}" for size in one.memory)
    return rank, one.candidate.name, f"{one.step.seconds:.2f}", f"{one.step.tokens_per_device:,.0f}", memory


def _reasons(found: Found) -> str:
    return "; ".join(f"left out {count}: {reason}" for reason, count in found.left_out.most_common())


def _tree(one: Planned) -> dict[str, Any]:
    return {
        "strategy": one.candidate.tree(),
        "seconds": one.step.seconds,
        "tokens_per_second_per_device": one.step.tokens_per_device,
        "memory": list(one.memory),
    }


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return value


if __name__ == "__main__":
    run_command(main)
