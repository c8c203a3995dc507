"""``mindllm search``: find the fastest strategy that fits the devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindllm.architecture.experts import DISPATCHES
from mindllm.architecture.layer_counts import SEARCHED
from mindllm.command import CommandParser, duration, output_directory, output_file, run_command
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show
from mindllm.timing.shipped import DEFAULT, shipped_devices

EXAMPLES = """example:
  %(prog)s configs/llama2/pretrain_llama2_70b_64p.yaml --devices 64
  %(prog)s run.yaml --devices 64 --global_batch 512 --dry_run 3 --apply tuned.yaml
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm search",
        takes_keys=True,
        description="The strategies of a run on a number of devices, the fastest first: predicted, the best planned, and the "
        "best of those held to a dry run, beside the YAML as it is. What does not fit is never called best. An interrupted "
        "search goes on where it was. Further options change keys of the configuration. Exit code 0: found, 3: nothing fits, "
        "2: wrong input.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--config", required=True, metavar="YAML", help="the run; also without --config, as the first word"
    )
    parser.add_argument("--devices", type=_positive, metavar="N", help="how many (default: the configuration's)")
    parser.add_argument("--global_batch", type=_positive, metavar="B", help="sequences of a step (default: likewise)")
    names = ", ".join(shipped_devices())
    parser.add_argument(
        "--device", default=DEFAULT, metavar="FILE", help=f"a YAML or one of {names} (default: %(default)s)"
    )
    parser.add_argument(
        "--best", type=_positive, default=5, metavar="K", help="planned and shown (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=duration, default=5.0, help="for each plan (default: %(default)s)")
    parser.add_argument(
        "--dry_run",
        type=_positive,
        metavar="K",
        help="of the best ones, simulated by MindSpore's dry run, and planned again where they do not fit",
    )
    parser.add_argument(
        "--schedules", nargs="+", choices=SEARCHED, default=(), metavar="S",
        help=f"orders of micro-batches: {', '.join(SEARCHED)}, those from seqpipe on also with sequences in pieces (default: the "
        "first, and what the configuration has)",
    )  # fmt: skip
    parser.add_argument(
        "--dispatch", nargs="+", choices=DISPATCHES, default=(), metavar="D",
        help=f"how tokens reach their experts: {', '.join(DISPATCHES)} (default: what computes the same as the configuration)",
    )  # fmt: skip
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write all strategies as CSV, the fastest first"
    )
    parser.add_argument("--apply", type=output_file, metavar="YAML", help="writes the best as a run")
    add_memory_option(parser)
    add_executor_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument(
        "--output",
        type=output_directory,
        default="output_tune",
        metavar="DIR",
        help="directory for page and progress (output_tune)",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, shows and writes; returns 0 when a strategy fits."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config import load_config
    from mindllm.strategies.constraints import Constraints
    from mindllm.strategies.outcome import PAGE, Wanted, find_strategies
    from mindllm.timing.device import read_device

    config, device = load_config(options.config, overrides), read_device(options.device)
    directory = Path(options.output)
    directory.mkdir(parents=True, exist_ok=True)
    wanted = Wanted(
        options.devices, options.global_batch, options.best, options.seconds, options.dry_run,
        Constraints(dispatch=tuple(options.dispatch)), tuple(options.schedules),
    )  # fmt: skip
    with drawn() as progress:
        found = find_strategies(config, device, wanted, directory, progress)
    found.write_page(directory / PAGE)
    if options.csv:
        found.write_csv(options.csv)
    show(found, options.json)
    if not options.json:
        output.print(f"{directory / PAGE}: memory and speed of all")
        if options.csv:
            output.print(f"{options.csv}: all {len(found.entries)} strategies")
    if options.apply:
        from mindllm.recipes.spare_files import forget_spares, say_forgotten

        found.write(options.apply)
        checked = (
            "validated by the dry run" if found.recommended.simulated else "not validated by a dry run (--dry_run N)"
        )
        error_console.print(f"wrote {options.apply}: {found.recommended_name}; {checked}")
        if said := say_forgotten(options.apply, forget_spares(options.apply)):
            error_console.print(said)
    return 0


if __name__ == "__main__":
    run_command(main)
