"""The command line ``python -m toolkit.step_time``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindllm.cli import calibrate
from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import load_config
from mindllm.console import output, print_json, styled
from mindllm.errors import CheckFailed, UserError
from mindllm.tables import Table, figures, texts
from mindllm.timing import foreign_program as simulated
from mindllm.timing.calibrate import uncalibrated
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, Device, read_device, shipped_devices
from mindllm.timing.stage_times import StageTime, mean_stage, report, stage_times, table
from mindllm.timing.step import StepTime, step_time
from mindllm.timing.timeline import write_timeline
from mindllm.timing.verdict import Room, implausible, memory_limit
from mindllm.timing.what_if import changes

CALIBRATE = "calibrate"
ADVICE = "python -m toolkit.tune looks for a strategy that fits"
EXAMPLES = """example:
  python -m toolkit.step_time --config configs/llama2/pretrain_llama2_70b_64p.yaml
  python -m toolkit.step_time --config run.yaml --device a100_80g --explain --timeline step.json
  python -m toolkit.step_time --simulated output_offline
  python -m toolkit.step_time calibrate --measured steps.csv --output my_device.yaml
"""


def make_parser() -> CommandParser:
    """Returns the parser of predictions."""
    parser = CommandParser(
        prog="python -m toolkit.step_time",
        description="How long a training step takes on a described device, and where the time goes. Further options change "
        "keys of the configuration, as with run_llm.py. Exit code 0: predicted (also of a run that does not fit, which is told), "
        "3: --must_fit, and a stage does not, 2: wrong input.",
        epilog=EXAMPLES,
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--config", metavar="YAML", help="the run")
    subject.add_argument(
        "--simulated",
        type=Path,
        metavar="DIR",
        help="what toolkit.offline kept of any program: from its compiled graphs",
    )
    parser.add_argument(
        "--device",
        default=DEFAULT,
        metavar="FILE",
        help=f"a YAML, or one of {', '.join(shipped_devices())} (default: %(default)s)",
    )
    parser.add_argument("--zero_shot", action="store_true", help="the device as it was before it was calibrated")
    parser.add_argument("--explain", action="store_true", help="what one change would bring")
    parser.add_argument("--timeline", type=output_file, metavar="FILE", help="a trace for Perfetto (ui.perfetto.dev)")
    parser.add_argument(
        "--must_fit", action="store_true", help="end with exit code 3 where a stage needs more memory than it may take"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    return parser


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
        raise CheckFailed(f"the run {memory}, by formula; {ADVICE}")
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
        "operators: from the architecture, not from a compiled graph; memory: by formula, python -m toolkit.dry_run measures it"
    )


def _simulated(options: argparse.Namespace, overrides: Sequence[str], device: Device) -> int:
    """The step of a program that is not mindllm's."""
    if overrides:
        raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
    for name in ("explain", "timeline"):
        if getattr(options, name):
            raise UserError(f"--{name}: belongs to --config YAML; of a kept graph there is one step and no other")
    if options.must_fit:
        raise UserError("--must_fit: belongs to --config YAML; what a kept program needs says toolkit.offline")
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
    found = [] if memory.fits else [f"does not fit: it {memory}, by formula; {ADVICE}"]
    if what := implausible(step.utilisation):
        part, seconds = max(mean_stage(step).items(), key=lambda item: item[1])
        share = f"{100 * seconds / step.seconds:.0f}% of it is {part}"
        found.append(f"implausible: {what}; do not trust the step before you know why ({share})")
    return found


def headline(step: StepTime) -> str:
    """The step in a line."""
    strategy = step.workload.strategy
    return (
        f"{step.device.name}, {strategy.devices} devices: {step.seconds:.3f} s a step, {step.tokens_per_device:,.0f} "
        f"tokens/s/device, {100 * step.utilisation:.1f}% model FLOPs utilisation"
    )


if __name__ == "__main__":
    run_command(main)
