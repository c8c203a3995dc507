"""``mindllm time``: how long a step takes, and where the time goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.terminal.console import error_console
from mindllm.terminal.render import drawn, show
from mindllm.timing.shipped import DEFAULT, shipped_devices

if TYPE_CHECKING:
    from mindllm.timing.device import Device

CALIBRATE = "calibrate"
EXAMPLES = """example:
  %(prog)s configs/llama2/pretrain_llama2_70b_64p.yaml
  %(prog)s run.yaml --device a100_80g --explain --timeline step.json
  %(prog)s --simulated output_offline
  %(prog)s calibrate --measured steps.csv --output my_device.yaml
"""
CALIBRATE_EXAMPLES = """example:
  %(prog)s --here --output here.yaml
  %(prog)s --measured steps.csv --device atlas_800t_a2 --output my_device.yaml
  %(prog)s --kernels profile/kernel_details.csv --measured steps.csv --output my_device.yaml
"""


class TimeParser(CommandParser):
    """The parser of predictions; behind ``calibrate`` come options of its own."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the options of whichever is called."""
        given = list(sys.argv[1:] if args is None else args)
        if given[:1] == [CALIBRATE]:
            return calibrate_parser().parse_known_args(given[1:], namespace)
        return super().parse_known_args(given, namespace)


def make_parser() -> CommandParser:
    """Returns the parser of predictions."""
    parser = TimeParser(
        prog="mindllm time",
        takes_keys=True,
        description="How long a training step takes on a described device, and where the time goes. Further options change "
        "keys of the configuration, as with run_llm.py. Exit code 0: predicted (also of a run that does not fit, which is told), "
        "3: --must_fit, and a stage does not, 2: wrong input.",
        epilog=EXAMPLES,
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--config", metavar="YAML", help="the run; also without --config, as the first word")
    subject.add_argument(
        "--simulated",
        type=Path,
        metavar="DIR",
        help="what mindllm offline kept of any program: from its compiled graphs",
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


def calibrate_parser() -> CommandParser:
    """Return the parser of calibration."""
    parser = CommandParser(
        prog=f"mindllm time {CALIBRATE}",
        description="Fits the free constants of a device: what kernels reach to the kernels of a profile, the others to "
        "measured steps. The errors that are told are of kernels and steps that were left out.",
        epilog=CALIBRATE_EXAMPLES,
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="CSV",
        help="columns config (a YAML) and seconds (of a step) or profile",
    )
    parser.add_argument(
        "--kernels",
        type=Path,
        metavar="FILE",
        help="kernel_details.csv of MindSpore's profiler (level 1), or its directory",
    )
    parser.add_argument("--device", default=DEFAULT, metavar="FILE", help="where to start (default: %(default)s)")
    parser.add_argument(
        "--here", action="store_true", help="measure this machine's CPU by small training runs, in about two minutes"
    )
    parser.add_argument(
        "--output", type=output_file, required=True, metavar="FILE", help="YAML file to write: the calibrated device"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts a step, or calibrates a device."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [CALIBRATE]:
        from mindllm.cli.calibrate import calibrate_device

        parser = calibrate_parser()
        return calibrate_device(parser, parser.parse_args(given[1:]))
    options, overrides = make_parser().parse_known_args(given)

    from mindllm.config import load_config
    from mindllm.timing.device import read_device
    from mindllm.timing.measured.calibrate import uncalibrated
    from mindllm.timing.prediction import predict

    device = read_device(options.device)
    if options.zero_shot:
        device = uncalibrated(device)
    if options.simulated is not None:
        return _simulated(options, overrides, device)
    config = load_config(options.config, overrides)
    if config.about_mode:
        error_console.print(config.about_mode)
    with drawn() as progress:
        progress("predicting the step", 0, 1)
        predicted = predict(config, device, options.explain)
    if options.timeline:
        predicted.write_timeline(options.timeline)
    show(predicted, options.json)
    if options.must_fit and not predicted.fits:
        raise CheckFailed(f"the run {predicted.shortage}")
    return 0


def _simulated(options: argparse.Namespace, overrides: Sequence[str], device: Device) -> int:
    """Predict the step of another program."""
    from mindllm.programs import time_program

    if overrides:
        raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
    for name in ("explain", "timeline"):
        if getattr(options, name):
            raise UserError(f"--{name}: belongs to --config YAML; of a kept graph there is one step and no other")
    if options.must_fit:
        raise UserError("--must_fit: belongs to --config YAML; what a kept program needs says mindllm offline")
    with drawn() as progress:
        progress(f"reading the graphs of {options.simulated}", 0, 1)
        step = time_program(options.simulated, device)
    show(step, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
