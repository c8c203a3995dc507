"""``mindllm search``: find the fastest parallel strategy that fits."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.architecture.experts import DISPATCHES
from mindllm.architecture.layer_counts import SEARCHED
from mindllm.cli.common import add_device_option, add_json_option
from mindllm.command import CommandParser, output_directory, output_file, positive, positive_number, run_command
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show

EXAMPLES = """examples:
  %(prog)s configs/llama2/pretrain_llama2_70b_64p.yaml --devices 64
  %(prog)s run.yaml --devices 64 --global-batch 512 --dry-run 3 --apply tuned.yaml

Exit codes: 0 a strategy fits, 3 none fits, 2 invalid input.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm search",
        takes_keys=True,
        description="Ranks the parallel strategies of a run on a number of devices, fastest first, next to the strategy of the "
        "YAML. All are predicted; the best are planned, and checked by a dry run with --dry-run. Strategies that do not fit "
        "are never recommended. An interrupted search continues.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    parser.add_run()
    add("--devices", type=positive, metavar="N", help="number of devices (default: set by the run)")
    add("--global-batch", type=positive, metavar="B", help="sequences per step (default: set by the run)")
    add_device_option(parser)
    add("--best", type=positive, default=5, metavar="K", help="plan and show the K best (default: %(default)s)")
    seconds = "time limit of each plan (default: %(default)s)"
    add("--seconds", type=positive_number, default=5.0, metavar="SECONDS", help=seconds)
    add(
        "--dry-run",
        type=positive,
        metavar="K",
        help="check the K best by MindSpore's dry run, and plan again until they fit",
    )
    schedules = (
        f"micro-batch schedules: {', '.join(SEARCHED)}; from seqpipe on also with sequences in pieces (default: the first, "
        "and that of the run)"
    )
    add("--schedules", nargs="+", choices=SEARCHED, default=(), metavar="S", help=schedules)
    dispatch = f"expert dispatch: {', '.join(DISPATCHES)} (default: those that compute the same as the run)"
    add("--dispatch", nargs="+", choices=DISPATCHES, default=(), metavar="D", help=dispatch)
    add("--csv", type=output_file, metavar="FILE", help="write all strategies as CSV, fastest first")
    add("--apply", type=output_file, metavar="FILE", help="write the best strategy as the YAML of a run")
    add_memory_option(parser)
    add_executor_option(parser)
    directory = "directory for the page and saved progress (default: %(default)s)"
    add("--output", type=output_directory, default="output_tune", metavar="DIR", help=directory)
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, show and write strategies; return 0 if one fits."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm import api
    from mindllm.strategies.outcome import PAGE

    config = api.load_config(options.run, overrides)
    with drawn() as progress:
        strategies = api.search(
            config,
            devices=options.devices,
            global_batch=options.global_batch,
            device=options.device,
            best=options.best,
            seconds=options.seconds,
            dry_run=options.dry_run,
            schedules=options.schedules,
            dispatch=options.dispatch,
            output=options.output,
            progress=progress,
        )
    page = options.output / PAGE
    strategies.write_page(page)
    if options.csv:
        strategies.write_csv(options.csv)
    show(strategies, options.json)
    if not options.json:
        output.print(f"memory and speed of all strategies: {page}")
        if options.csv:
            output.print(f"wrote {options.csv} ({len(strategies.entries)} strategies)")
    if options.apply:
        from mindllm.recipes.recipe import removal_note, remove_spares

        strategies.write(options.apply)
        checked = "validated by the dry run"
        if not strategies.recommended.simulated:
            checked = "not validated by a dry run (--dry-run N)"
        error_console.print(f"wrote {options.apply}: {strategies.recommended_name}; {checked}")
        if note := removal_note(options.apply, remove_spares(options.apply)):
            error_console.print(note)
    return 0


if __name__ == "__main__":
    run_command(main)
