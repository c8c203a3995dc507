"""What ``mindllm time`` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from mindllm.cli import calibrate
from mindllm.cli.parsers.time import CALIBRATE, make_parser
from mindllm.cli.registry import spelled
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.console import output, print_json, styled
from mindllm.errors import CheckFailed, UserError
from mindllm.tables import Table, figures, texts
from mindllm.timing import foreign_program as simulated
from mindllm.timing.calibrate import uncalibrated
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device, read_device
from mindllm.timing.stage_times import StageTime, mean_stage, report, stage_times, table
from mindllm.timing.step import StepTime, step_time
from mindllm.timing.timeline import write_timeline
from mindllm.timing.verdict import Room, implausible, memory_limit
from mindllm.timing.what_if import changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts a step, or calibrates a device."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [CALIBRATE]:
        return calibrate.main(given[1:])
    options, overrides = make_parser().parse_known_args(given)
    device = read_device(options.device)
    if options.zero_shot:
        device = uncalibrated(device)
    if options.simulated is not None:
        return _simulated(options, overrides, device)
    config = load_config(options.config, overrides)
    step = step_time(workload_of(config), device)
    stages = stage_times(step)
    memory = Room(tuple(stage.memory for stage in stages), memory_limit(config, device))
    found = changes(step) if options.explain else {}
    if options.timeline:
        write_timeline(step, options.timeline)
    if options.json:
        print_json(report(step, stages, found, memory))
    else:
        _show(step, stages, found, memory)
    if options.must_fit and not memory.fits:
        raise CheckFailed(f"the run {memory}, by formula; {spelled('search')} looks for a strategy that fits")
    return 0


def _show(step: StepTime, stages: Sequence[StageTime], found: Mapping[str, float], memory: Room) -> None:
    output.print(headline(step))
    for doubt in doubts(step, memory):
        output.print(styled((doubt, "bold red")))
    output.print(table(stages))
    if found:
        rows = [
            (name, f"{seconds:.3f}", f"{100 * (step.seconds / seconds - 1):+.1f}%") for name, seconds in found.items()
        ]
        output.print(Table("one change alone", [*texts("change"), *figures("step s", "speed")], rows))
    if step.uncounted:
        output.print(f"not counted: {'; '.join(step.uncounted)}")
    output.print(
        "operators: from the architecture, not from a compiled graph; memory: by formula, "
        f"{spelled('dry-run')} measures it"
    )


def _simulated(options: argparse.Namespace, overrides: Sequence[str], device: Device) -> int:
    """The step of a program that is not mindllm's."""
    if overrides:
        raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
    for name in ("explain", "timeline"):
        if getattr(options, name):
            raise UserError(f"--{name}: belongs to --config YAML; of a kept graph there is one step and no other")
    if options.must_fit:
        raise UserError(f"--must_fit: belongs to --config YAML; what a kept program needs says {spelled('offline')}")
    step = simulated.program_step(options.simulated, device)
    if options.json:
        print_json(simulated.report(step))
        return 0
    output.print(f"{device.name}, {len(step.stages)} stages: {step.seconds:.3f} s a step")
    output.print(simulated.table(step))
    if step.uncounted:
        output.print(f"only the bytes take time of {', '.join(step.uncounted)}: their operations are not known")
    output.print("operators: of the compiled graphs; passes follow each other as 1F1B has them")
    return 0


def doubts(step: StepTime, memory: Room) -> list[str]:
    """What the headline would hide: stages that do not fit, a utilisation that no run has."""
    found = (
        []
        if memory.fits
        else [f"does not fit: it {memory}, by formula; {spelled('search')} looks for a strategy that fits"]
    )
    if what := implausible(step.utilisation):
        part, seconds = max(mean_stage(step).items(), key=lambda item: item[1])
        share = f"{100 * seconds / step.seconds:.0f}% of it is {part}"
        found.append(f"implausible: {what}; do not trust the step before you know why ({share})")
    return found


def headline(step: StepTime) -> str:
    """The step in a line."""
    strategy = step.workload.strategy
    return (
        f"{step.device.name}, {strategy.device_num} devices: {step.seconds:.3f} s a step, {step.tokens_per_device:,.0f} "
        f"tokens/s/device, {100 * step.utilisation:.1f}% model FLOPs utilisation"
    )


if __name__ == "__main__":
    run_command(main)
