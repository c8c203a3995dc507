"""What ``mindllm dry-run`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindllm.axes import NAMED_AXES
from mindllm.cli.parsers.dry_run import make_parser
from mindllm.command import run_command
from mindllm.compiled.simulation.simulate_rank import DEVICE_MEMORY
from mindllm.config import RunConfig, load_config
from mindllm.console import error_console, output, print_json
from mindllm.dry_run.advice import shortage
from mindllm.dry_run.forecast import StageMemory, forecast_stages, simulate_stages
from mindllm.dry_run.page import PAGE, render_page
from mindllm.dry_run.report import json_report, log_lines, table
from mindllm.dry_run.simulations import Simulations, can_simulate
from mindllm.dry_run.source_lines import Lines
from mindllm.dry_run.stages import Stage, stages_of
from mindllm.errors import CheckFailed, UserError
from mindllm.files import atomic_open


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what every stage needs; returns 0 when all fit."""
    options, overrides = make_parser().parse_known_args(arguments)
    if options.max_device_memory:
        overrides += [f"--context.max_device_memory={options.max_device_memory}"]
    config = load_config(options.config, overrides)
    _check_cluster(config, options)
    stages = _chosen(config, options.stages)
    simulations = Simulations(options.workers, error_console, estimates=not can_simulate())
    simulations.prepare_source_lines(config)
    find = simulate_stages if options.full else forecast_stages
    memories = find(config, stages, simulations)
    limit = config.context.device_memory
    _write(memories, config, limit, options.output, simulations.source_lines(config))
    if options.json:
        print_json(json_report(memories, limit))
    else:
        _show(memories, config, limit, options.output)
    if any(memory.actual_peak > limit for memory in memories):
        raise CheckFailed(shortage(memories, config, limit, simulations, options.advice))
    return 0


def _check_cluster(config: RunConfig, options: argparse.Namespace) -> None:
    """Refuses numbers of devices and stages that are not those of the configuration, and other devices than Ascend."""
    target = config.context.device_target
    if target != "Ascend":
        raise config.error("context.device_target", f"only Ascend devices are simulated (value {target}); write Ascend")
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


def _chosen(config: RunConfig, numbers: Sequence[int] | None) -> list[Stage]:
    stages = stages_of(config)
    wanted = sorted(set(range(len(stages)) if numbers is None else numbers))
    unknown = [number for number in wanted if not 0 <= number < len(stages)]
    if unknown:
        raise UserError(f"--stages {unknown[0]}: there is no such stage; write 0 to {len(stages) - 1}")
    return [stages[number] for number in wanted]


def _write(memories: Sequence[StageMemory], config: RunConfig, limit: int, directory: Path, lines: Lines) -> None:
    """Writes a log for each rank, and the page."""
    for memory in memories:
        with atomic_open(directory / f"rank_{memory.stage.rank}.log") as log:
            log.write("\n".join(log_lines(memory, config, DEVICE_MEMORY, limit)) + "\n")
    with atomic_open(directory / PAGE) as page:
        page.write(render_page(memories, config, limit, lines))


def _show(memories: Sequence[StageMemory], config: RunConfig, limit: int, directory: Path) -> None:
    estimated = any(memory.estimated for memory in memories)
    source = "an estimate from the compiled graph" if estimated else "what MindSpore's dry run reports"
    output.print(table(memories, config, limit))
    output.print(
        f"used peak: {source}, the sum of the columns before it; "
        "with workspace ≈: an estimate of what kernels need beside it"
    )
    if any(not memory.exact for memory in memories):
        output.print(
            "extrapolated: from smaller runs of the same widths, checked against one more; --full simulates whole stages"
        )
    output.print(f"{directory / PAGE}: what fills the memory; {directory}/rank_*.log")


if __name__ == "__main__":
    run_command(main)
