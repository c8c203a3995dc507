"""What ``mindllm dry-run`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mindllm.axes import NAMED_AXES
from mindllm.cli.parsers.dry_run import make_parser
from mindllm.command import run_command
from mindllm.config import RunConfig, load_config
from mindllm.dry_run.run import advise, check_target, simulate
from mindllm.dry_run.simulations import simulations_here
from mindllm.errors import CheckFailed, UserError
from mindllm.terminal.console import output
from mindllm.terminal.render import drawn, show


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what every stage needs; returns 0 when all fit."""
    options, overrides = make_parser().parse_known_args(arguments)
    if options.max_device_memory:
        overrides += [f"--context.max_device_memory={options.max_device_memory}"]
    config = load_config(options.config, overrides)
    check_target(config)
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
