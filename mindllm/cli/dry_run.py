"""``mindllm dry-run``: memory of each stage by MindSpore's dry run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindllm.axes import NAMED_AXES
from mindllm.cli.common import add_json_option
from mindllm.command import CommandParser, non_negative, output_directory, patience, positive, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import output
from mindllm.terminal.render import drawn, show

if TYPE_CHECKING:
    from mindllm.config import RunConfig

EXAMPLE = """examples:
  %(prog)s configs/llama2/pretrain_llama2_13b.yaml
  %(prog)s run.yaml --stages 0 7 --max-device-memory 54GB --recompute_config.recompute=[8,8]

Exit codes: 0 all stages fit, 3 a stage does not fit, 2 invalid input.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm dry-run",
        takes_keys=True,
        description="Simulates the first rank of every pipeline stage by MindSpore's dry run, without a device, and shows its "
        "memory and whether it fits.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    parser.add_run()
    add("--stages", type=non_negative, nargs="+", metavar="N", help="simulate only these stages (default: all)")
    add("--full", action="store_true", help="simulate whole stages instead of extrapolating from small ones")
    add("--max-device-memory", metavar="SIZE", help="memory limit, such as 58GB (default: set by the run)")
    directory = "directory for logs and page (default: %(default)s)"
    add("--output", type=output_directory, default="output_dryrun", metavar="DIR", help=directory)
    add("--workers", type=positive, metavar="N", help="concurrent simulations (default: one per core)")
    advice = "if a stage does not fit, stop searching for memory fixes after SECONDS (default: %(default)s)"
    add("--advice", type=patience, default=20.0, metavar="SECONDS", help=advice)
    add_memory_option(parser)
    add_executor_option(parser)
    add("--rank-size", type=int, metavar="N", help="fail unless the run has N devices")
    add("--stage-num", type=int, metavar="N", help="fail unless the run has N pipeline stages")
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the memory of every stage; return 0 if all fit."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm import api
    from mindllm.compiled.simulation.simulate_rank import check_simulated
    from mindllm.dry_run import simulations
    from mindllm.dry_run.page import PAGE
    from mindllm.dry_run.run import advise

    if options.max_device_memory:
        overrides += [f"--context.max_device_memory={options.max_device_memory}"]
    config = api.load_config(options.run, overrides)
    check_simulated(config)
    _check_sizes(config, options)
    with drawn(transient=False) as progress:
        result = api.dry_run(
            config,
            stages=options.stages,
            full=options.full,
            workers=options.workers,
            advice=0.0,
            output=options.output,
            progress=progress,
        )
    show(result, options.json)
    if not options.json:
        output.print(f"memory contents: {options.output / PAGE}; logs: {options.output}/rank_*.log")
    if not result.fits:  # the table is shown before the search for fixes, which takes time
        with drawn(transient=False) as progress:
            raise CheckFailed(advise(result, simulations.simulations_here(options.workers, progress), options.advice))
    return 0


def _check_sizes(config: RunConfig, options: argparse.Namespace) -> None:
    """Raise UserError if the run has other numbers of devices or stages than the options require."""
    sizes = config.parallel_config
    if options.rank_size not in (None, sizes.device_num):
        product = " x ".join(str(sizes.size(axis)) for axis in NAMED_AXES)
        raise UserError(
            f"RANK_SIZE is {options.rank_size}, but {options.run} has {sizes.device_num} devices (data x context x model x "
            f"pipeline parallel: {product}); use {sizes.device_num}, or change parallel_config"
        )
    if options.stage_num not in (None, sizes.pipeline_stage):
        raise UserError(
            f"STAGES is {options.stage_num}, but {options.run} has parallel_config.pipeline_stage "
            f"{sizes.pipeline_stage}; use {sizes.pipeline_stage}, or change the key"
        )


if __name__ == "__main__":
    run_command(main)
