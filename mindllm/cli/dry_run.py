"""``mindllm dry-run``: memory of every stage, by MindSpore's dry run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindllm.axes import NAMED_AXES
from mindllm.command import CommandParser, output_directory, patience, positive, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import output
from mindllm.terminal.render import drawn, show

if TYPE_CHECKING:
    from mindllm.config import RunConfig

ADVICE_SECONDS = 20
EXAMPLE = """example:
  %(prog)s configs/llama2/pretrain_llama2_13b.yaml
  %(prog)s run.yaml --stages 0 7 --max_device_memory 54GB --recompute_config.recompute=[8,8]
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm dry-run",
        takes_keys=True,
        description="MindSpore's own dry run of the first rank of every pipeline stage, without a device: what fills its "
        "memory, and whether that fits. Further options change keys of the configuration, as with run_llm.py. "
        "Exit code 0: all stages fit, 3: one does not, 2: wrong input.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--config", required=True, metavar="YAML", help="the run; also without --config, as the first word"
    )
    parser.add_argument("--stages", type=int, nargs="+", metavar="N", help="only these stages (default: all)")
    parser.add_argument("--full", action="store_true", help="simulate whole stages instead of extrapolating small ones")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--max_device_memory", metavar="SIZE", help="the limit, as 58GB (default: the configuration's)")
    parser.add_argument(
        "--output",
        type=output_directory,
        default="output_dryrun",
        metavar="DIR",
        help="directory for logs and page (output_dryrun)",
    )
    parser.add_argument("--workers", type=positive, metavar="N", help="simulations at once (default: one per core)")
    parser.add_argument(
        "--advice",
        type=patience,
        default=ADVICE_SECONDS,
        metavar="SECONDS",
        help="where a stage does not fit, try changes that would help, and begin none after so long (default: %(default)s)",
    )
    add_memory_option(parser)
    add_executor_option(parser)
    parser.add_argument("--rank_size", type=int, metavar="N", help="devices the configuration must have")
    parser.add_argument("--stage_num", type=int, metavar="N", help="pipeline stages the configuration must have")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what every stage needs; returns 0 when all fit."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.compiled.simulation.simulate_rank import check_simulated
    from mindllm.config import load_config
    from mindllm.dry_run.run import advise, simulate
    from mindllm.dry_run.simulations import simulations_here

    if options.max_device_memory:
        overrides += [f"--context.max_device_memory={options.max_device_memory}"]
    config = load_config(options.config, overrides)
    check_simulated(config)
    _check_cluster(config, options)
    with drawn(transient=False) as progress:
        simulations = simulations_here(options.workers, progress)
        found = simulate(config, simulations, options.stages, options.full, with_lines=True)
    page = found.write(options.output)
    show(found, options.json)
    if not options.json:
        output.print(f"{page}: what fills the memory; {options.output}/rank_*.log")
    if not found.fits:
        with drawn(transient=False) as progress:
            simulations.progress = progress
            raise CheckFailed(advise(found, simulations, options.advice))
    return 0


def _check_cluster(config: RunConfig, options: argparse.Namespace) -> None:
    """Refuses numbers of devices and stages that are not those of the configuration."""
    sizes = config.parallel_config
    if options.rank_size not in (None, sizes.device_num):
        product = " x ".join(str(sizes.size(axis)) for axis in NAMED_AXES)
        raise UserError(
            f"RANK_SIZE is {options.rank_size}, but {options.config} has {sizes.device_num} devices (data x context x model x "
            f"pipeline parallel: {product}); "
            f"write {sizes.device_num}, or change parallel_config"
        )
    if options.stage_num not in (None, sizes.pipeline_stage):
        raise UserError(
            f"STAGES is {options.stage_num}, but {options.config} has parallel_config.pipeline_stage "
            f"{sizes.pipeline_stage}; write {sizes.pipeline_stage}, or change it"
        )


if __name__ == "__main__":
    run_command(main)
