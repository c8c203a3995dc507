"""What ``mindllm time`` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mindllm.cli import calibrate
from mindllm.cli.parsers.time import CALIBRATE, make_parser
from mindllm.cli.registry import spelled
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.errors import CheckFailed, UserError
from mindllm.terminal.render import show
from mindllm.timing.device import Device, read_device
from mindllm.timing.foreign_program import program_step
from mindllm.timing.measured.calibrate import uncalibrated
from mindllm.timing.prediction import predict


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
    predicted = predict(load_config(options.config, overrides), device, options.explain)
    if options.timeline:
        predicted.write_timeline(options.timeline)
    show(predicted, options.json)
    if options.must_fit and not predicted.fits:
        raise CheckFailed(f"the run {predicted.shortage}")
    return 0


def _simulated(options: argparse.Namespace, overrides: Sequence[str], device: Device) -> int:
    """The step of a program that is not mindllm's."""
    if overrides:
        raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
    for name in ("explain", "timeline"):
        if getattr(options, name):
            raise UserError(f"--{name}: belongs to --config YAML; of a kept graph there is one step and no other")
    if options.must_fit:
        raise UserError(f"--must_fit: belongs to --config YAML; what a kept program needs says {spelled('offline')}")
    show(program_step(options.simulated, device), options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
