"""``mindllm time``: predict the time of a step; ``mindllm time calibrate``: fit a device description to measurements."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.cli.common import add_device_option, add_json_option
from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show
from mindllm.timing.shipped import DEFAULT

if TYPE_CHECKING:
    from mindllm.timing.device import Device
    from mindllm.timing.measured.calibrate import Calibration, Measured

CALIBRATE = "calibrate"
EXAMPLES = """examples:
  %(prog)s configs/llama2/pretrain_llama2_70b_64p.yaml
  %(prog)s run.yaml --device a100_80g --explain --timeline step.json
  %(prog)s --simulated output_offline
  %(prog)s calibrate --measured steps.csv --output my_device.yaml

Exit codes: 0 predicted, also for a run that does not fit; 3 a stage does not fit, with --must-fit; 2 invalid input.
"""
CALIBRATE_EXAMPLES = """examples:
  %(prog)s --here --output here.yaml
  %(prog)s --measured steps.csv --device atlas_800t_a2 --output my_device.yaml
  %(prog)s --kernels profile/kernel_details.csv --measured steps.csv --output my_device.yaml
"""
CONFIG, SECONDS, PROFILE = "config", "seconds", "profile"  # columns of --measured
FEWEST_ROWS = 2
ERROR_QUANTILE, LEAST_ERROR = 0.9, 0.001


class TimeParser(CommandParser):
    """The parser of predictions, which forwards to that of calibration after the word ``calibrate``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the options of a prediction or of a calibration."""
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] == [CALIBRATE]:
            return calibrate_parser().parse_known_args(words[1:], namespace)
        return super().parse_known_args(words, namespace)


def make_parser() -> CommandParser:
    """Return the parser of predictions."""
    parser = TimeParser(
        prog="mindllm time",
        takes_keys=True,
        description="Predicts the time of a training step on a described device, and its parts.",
        epilog=EXAMPLES,
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    parser.add_run(group=subject)
    simulated = "output directory of mindllm offline for any MindSpore program, instead of a run"
    subject.add_argument("--simulated", type=Path, metavar="DIR", help=simulated)
    add = parser.add_argument
    add_device_option(parser)
    add("--zero-shot", action="store_true", help="use the device as it was before calibration")
    add("--explain", action="store_true", help="predict the gain of each single change")
    add("--timeline", type=output_file, metavar="FILE", help="write a trace for Perfetto (ui.perfetto.dev)")
    add("--must-fit", action="store_true", help="exit with code 3 if a stage exceeds its memory limit")
    add_json_option(parser)
    return parser


def calibrate_parser() -> CommandParser:
    """Return the parser of calibration."""
    parser = CommandParser(
        prog=f"mindllm time {CALIBRATE}",
        description="Fits the free constants of a device description: kernel efficiency to the kernels of a profile, all "
        "others to measured steps. Errors are reported for kernels and steps that were left out of the fit.",
        epilog=CALIBRATE_EXAMPLES,
    )
    add = parser.add_argument
    add("--measured", type=Path, metavar="CSV", help="columns config (a YAML) and seconds (per step) or profile")
    kernels = "kernel_details.csv of MindSpore's profiler (level 1), or its directory"
    add("--kernels", type=Path, metavar="FILE", help=kernels)
    add("--device", default=DEFAULT, metavar="FILE", help="device description to start from (default: %(default)s)")
    here = "measure the CPU of this machine by small training runs, in about two minutes"
    add("--here", action="store_true", help=here)
    device = "YAML file to write: the calibrated device"
    add("--output", type=output_file, required=True, metavar="FILE", help=device)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict a step or calibrate a device; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [CALIBRATE]:
        parser = calibrate_parser()
        return _calibrate(parser, parser.parse_args(words[1:]))
    options, overrides = make_parser().parse_known_args(words)
    if options.simulated is not None:
        return _time_program(options, overrides)

    from mindllm import api

    config = api.load_config(options.run, overrides)
    if config.about_mode:
        error_console.print(config.about_mode)
    with drawn() as progress:
        progress("predicting the step", 0, 1)
        step = api.step_time(config, device=options.device, zero_shot=options.zero_shot, explain=options.explain)
    if options.timeline:
        step.write_timeline(options.timeline)
    show(step, options.json)
    if options.must_fit and not step.fits:
        raise CheckFailed(f"the run {step.shortage}")
    return 0


def _time_program(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Predict the step of any MindSpore program from its compiled graphs."""
    from mindllm import api

    if overrides:
        raise UserError(f"{overrides[0]}: unknown option; --simulated has no keys of a run")
    for name in ("explain", "timeline", "must_fit"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} requires a run; it does not work with --simulated")
    with drawn() as progress:
        progress(f"reading the graphs of {options.simulated}", 0, 1)
        step = api.time_program(options.simulated, device=options.device, zero_shot=options.zero_shot)
    show(step, options.json)
    return 0


def _calibrate(parser: CommandParser, options: argparse.Namespace) -> int:
    """Fit a device description, print the errors of the fit, and write the device."""
    from mindllm.config.reading.yaml_tree import write_yaml
    from mindllm.files import atomic_open
    from mindllm.timing.device import read_device

    if not options.here and not options.measured and not options.kernels:
        parser.error("measurements are missing; pass --measured, --kernels or both, or --here")
    if options.here and (options.measured or options.kernels or options.device != DEFAULT):
        parser.error("--here measures this machine and its device; remove --measured, --kernels and --device")
    if options.here:
        device = _fit_this_machine()
    else:
        device = read_device(options.device)
        rows = read_measured(options.measured) if options.measured else []
        fixed: tuple[str, ...] = ()
        if options.kernels:
            device, fixed = _fit_kernels(device, options.kernels)
        if rows:
            device = _fit_steps(
                device, rows, f"{len(rows)} steps of {options.measured.name}", options.measured.name, fixed
            )
    with atomic_open(options.output) as file:
        file.write(write_yaml(device.model_dump(mode="json", exclude_none=False)))
    output.print(f"wrote {options.output}, for --device")
    return 0


def _fit_this_machine() -> Device:
    """Return the CPU of this machine, fitted to small training runs."""
    from mindllm.accept.this_machine import FITTED, NOT_TOLD, described_here, measure

    with tempfile.TemporaryDirectory(prefix="mindllm_") as directory, drawn() as progress:
        rows = [*measure(FITTED, Path(directory), progress)]
    return _fit_steps(described_here(), rows, f"{len(rows)} small runs of this machine", "this machine", NOT_TOLD)


def _fit_steps(device: Device, rows: Sequence[Measured], source: str, name: str, fixed: Collection[str] = ()) -> Device:
    """Return the device fitted to measured steps, with its cross-validated error; constants in ``fixed`` stay."""
    from mindllm.timing.measured.calibrate import calibrate

    calibration = calibrate(device, rows, f"calibrated on {source}", fixed)
    errors = cross_validate(device, rows, fixed)
    _show_calibration(calibration, rows, errors, device)
    return with_error(calibration.device, errors, name)


def _fit_kernels(device: Device, path: Path) -> tuple[Device, tuple[str, ...]]:
    """Return the device fitted to the kernels of a profile, and the names of the fitted constants; print the errors."""
    import numpy as np

    from mindllm.terminal.tables import Table, figures, texts
    from mindllm.timing.costs.work import VECTOR
    from mindllm.timing.measured import kernel_file
    from mindllm.timing.measured.kernels import errors_left_out, fit_kernels, kernel_errors

    kernels, skipped = kernel_file.read_kernels(path)
    for kernel in kernels:
        if kernel.operator.kind != VECTOR:
            device.matrix_rate(kernel.operator.dtype)  # raises UserError if the device lacks it
    fit = fit_kernels(device, kernels, f"measured: {len(kernels)} kernels of {path.name}")
    errors = [kernel_errors(device, kernels), kernel_errors(fit.device, kernels), errors_left_out(device, kernels)]
    _show_constants(fit)
    lines = []
    for kind in dict.fromkeys(kernel.operator.kind for kernel in kernels):
        mask = np.array([kernel.operator.kind == kind for kernel in kernels])
        seconds = sum(kernel.seconds * kernel.count for kernel in kernels if kernel.operator.kind == kind)
        means = (f"{100 * np.abs(each[mask]).mean():.1f}%" for each in errors)
        lines.append((kind, str(int(mask.sum())), f"{seconds:.4f}", *means))
    columns = figures("shapes", "total s", "before", "calibrated", "left out")
    output.print(Table("mean errors of kernels", [*texts("kernels"), *columns], lines))
    if skipped:
        output.print("not used: " + "; ".join(f"{count} {reason}" for reason, count in skipped.most_common(8)))
    return fit.device, tuple(fit.after)


def read_measured(path: Path) -> list[Measured]:
    """Return the runs of a CSV; paths of their YAMLs are relative to it.

    Raises:
        UserError: a column, a file or a number is missing or invalid.
    """
    from mindllm.outside import read_rows

    try:
        rows = read_rows(path)
    except OSError as error:
        raise UserError(f"--measured {path}: {error.strerror}") from None
    if not rows or CONFIG not in rows[0] or not {SECONDS, PROFILE} & set(rows[0]):
        raise UserError(
            f"--measured {path}: requires the columns {CONFIG} and {SECONDS} (per step) or {PROFILE} (directory or file of "
            "MindSpore's profiler), and a row for each run"
        )
    if len(rows) < FEWEST_ROWS:
        raise UserError(f"--measured {path}: has one row; add rows, at least {FEWEST_ROWS} are needed to leave one out")
    return [_measured(path, line, row) for line, row in enumerate(rows, 2)]


def _measured(path: Path, line: int, row: Mapping[str, str]) -> Measured:
    from mindllm.config import load_config
    from mindllm.timing.configured import workload_of
    from mindllm.timing.measured.calibrate import Measured
    from mindllm.timing.measured.kernel_file import profiled_step

    config, text = row[CONFIG], row.get(SECONDS)
    if row.get(PROFILE):
        step = profiled_step(path.parent / row[PROFILE])
        return Measured(config, workload_of(load_config(path.parent / config)), step)
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"--measured {path}:{line}: seconds must be a positive number (value {text})")
    return Measured(config, workload_of(load_config(path.parent / config)), seconds)


def cross_validate(device: Device, rows: Sequence[Measured], fixed: Collection[str] = ()) -> list[float]:
    """Return the error of every row, predicted by a device that is calibrated on the other rows."""
    from mindllm.terminal.console import track
    from mindllm.timing.measured.calibrate import calibrate
    from mindllm.timing.step import step_seconds

    errors = []
    for number, row in enumerate(track(rows, "cross-validating")):
        others = [*rows[:number], *rows[number + 1 :]]
        fitted = calibrate(device, others, "the other rows", fixed).device
        errors.append(float(step_seconds(row.workload, [fitted])[0] / row.seconds - 1))
    return errors


def with_error(device: Device, errors: Sequence[float], name: str) -> Device:
    """Return the device with the 90% quantile of its errors on steps outside the fit."""
    import numpy as np

    from mindllm.timing.device import Share

    error = float(np.quantile(np.abs(errors), ERROR_QUANTILE, method="higher"))
    source = f"{len(errors)} steps of {name}, each by a device fitted to the others"
    share = Share(value=min(1.0, max(LEAST_ERROR, round(error, 3))), source=source)
    return device.model_copy(update={"step_error": share})


def _show_constants(calibration: Calibration) -> None:
    from mindllm.terminal.tables import Table, figures, texts

    constants = [(name, f"{calibration.before[name]:.4g}", f"{value:.4g}") for name, value in calibration.after.items()]
    output.print(Table("constants", [*texts("constant"), *figures("before", "calibrated")], constants))


def _show_calibration(
    calibration: Calibration, rows: Sequence[Measured], errors: Sequence[float], device: Device
) -> None:
    import numpy as np

    from mindllm.terminal.tables import Table, figures, texts
    from mindllm.timing.step import step_seconds

    _show_constants(calibration)
    lines = []
    for row, error in zip(rows, errors, strict=True):
        both = (device, calibration.device)
        before, after = (step_seconds(row.workload, [each])[0] / row.seconds - 1 for each in both)
        lines.append((row.name, f"{row.seconds:.3f}", *(f"{100 * value:+.1f}%" for value in (before, after, error))))
    columns = figures("measured s", "before", "calibrated", "left out")
    output.print(Table("errors of predicted steps", [*texts("run"), *columns], lines))
    sizes = 100 * np.abs(errors)
    output.print(f"left out: mean {sizes.mean():.1f}%, median {np.median(sizes):.1f}%, worst {sizes.max():.1f}%")


if __name__ == "__main__":
    run_command(main)
