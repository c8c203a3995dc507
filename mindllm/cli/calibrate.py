"""What ``mindllm time calibrate`` does: a device's free constants from measured steps of one's own runs."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from mindllm.command import CommandParser
from mindllm.config import load_config
from mindllm.config.reading.yaml_tree import write_yaml
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.outside import read_rows
from mindllm.terminal.console import output, track
from mindllm.terminal.render import drawn
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.work import VECTOR
from mindllm.timing.device import DEFAULT, Device, Share, read_device
from mindllm.timing.measured import kernel_file
from mindllm.timing.measured.calibrate import Calibration, Measured, calibrate
from mindllm.timing.measured.kernel_file import profiled_step
from mindllm.timing.measured.kernels import errors_left_out, fit_kernels, kernel_errors
from mindllm.timing.step import step_seconds

CONFIG, SECONDS, PROFILE = "config", "seconds", "profile"
FEWEST = 2
NINE_OF_TEN, LEAST_ERROR = 0.9, 0.001


def calibrate_device(parser: CommandParser, options: Namespace) -> int:
    """Fits, says how well rows are predicted that were not given, and writes the device."""
    if options.here:
        return _here(parser, options)
    if not options.measured and not options.kernels:
        parser.error("nothing to calibrate on; give --measured, --kernels, or both; or --here")
    device = read_device(options.device)
    known: tuple[str, ...] = ()
    rows = read_measured(options.measured) if options.measured else []
    if options.kernels:
        device, known = from_kernels(device, options.kernels)
    if rows:
        found = calibrate(device, rows, f"calibrated on {len(rows)} steps of {options.measured.name}", known)
        held = held_out(device, rows, known)
        _show(found, rows, held, device)
        device = with_error(found.device, held, options.measured.name)
    return _write(device, options.output)


def _write(device: Device, path: Path) -> int:
    with atomic_open(path) as file:
        file.write(write_yaml(device.model_dump(mode="json", exclude_none=False)))
    output.print(f"{path}: for --device")
    return 0


def _here(parser: CommandParser, options: Namespace) -> int:
    """This machine's CPU: small runs of it, and a device fitted to them."""
    from mindllm.accept.this_machine import FITTED, NOT_TOLD, described_here, measure

    if options.measured or options.kernels or options.device != DEFAULT:
        parser.error("--here measures this machine, and starts from what it finds; leave out the other options")
    device = described_here()
    with tempfile.TemporaryDirectory(prefix="mindllm_") as directory, drawn() as progress:
        rows = [*measure(FITTED, Path(directory), progress)]
    found = calibrate(device, rows, f"calibrated on {len(rows)} small runs of this machine", NOT_TOLD)
    held = held_out(device, rows, NOT_TOLD)
    _show(found, rows, held, device)
    return _write(with_error(found.device, held, "this machine"), options.output)


def from_kernels(device: Device, path: Path) -> tuple[Device, tuple[str, ...]]:
    """The device as a profile's kernels tell it, and which constants those are; prints how well others are predicted."""
    kernels, left_out = kernel_file.read_kernels(path)
    for kernel in kernels:
        if kernel.operator.kind != VECTOR:
            device.matrix_rate(kernel.operator.dtype)
    found = fit_kernels(device, kernels, f"measured: {len(kernels)} kernels of {path.name}")
    errors = [kernel_errors(device, kernels), kernel_errors(found.device, kernels), errors_left_out(device, kernels)]
    _show_constants(found)
    lines = []
    for kind in dict.fromkeys(kernel.operator.kind for kernel in kernels):
        chosen = np.array([kernel.operator.kind == kind for kernel in kernels])
        spent = sum(kernel.seconds * kernel.count for kernel in kernels if kernel.operator.kind == kind)
        told = (f"{100 * np.abs(one[chosen]).mean():.1f}%" for one in errors)
        lines.append((kind, str(int(chosen.sum())), f"{spent:.4f}", *told))
    columns = figures("kinds", "s in all", "before", "calibrated", "left out")
    output.print(Table("mean errors of kernels", [*texts("kernels"), *columns], lines))
    if left_out:
        output.print("not used: " + "; ".join(f"{count} {reason}" for reason, count in left_out.most_common(8)))
    return found.device, tuple(found.after)


def read_measured(path: Path) -> list[Measured]:
    """The runs of a CSV; paths of their YAMLs are relative to it.

    Raises:
        UserError: a column, a file or a number is missing or makes no sense.
    """
    try:
        rows = read_rows(path)
    except OSError as error:
        raise UserError(f"--measured {path}: {error.strerror}") from None
    if not rows or CONFIG not in rows[0] or not {SECONDS, PROFILE} & set(rows[0]):
        raise UserError(
            f"--measured {path}: needs the columns {CONFIG} and {SECONDS} (of a step) or {PROFILE} (a directory or file of "
            "MindSpore's profiler), and a row for each run"
        )
    if len(rows) < FEWEST:
        raise UserError(f"--measured {path}: has one row; {FEWEST} are needed so that one can be left out")
    return [_row(path, number, row) for number, row in enumerate(rows, 2)]


def _row(path: Path, line: int, row: Mapping[str, str]) -> Measured:
    config, text = row[CONFIG], row.get(SECONDS)
    if row.get(PROFILE):
        return Measured(
            config, workload_of(load_config(path.parent / config)), profiled_step(path.parent / row[PROFILE])
        )
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"--measured {path}:{line}: seconds must be a positive number (value {text})")
    return Measured(config, workload_of(load_config(path.parent / config)), seconds)


def held_out(device: Device, rows: Sequence[Measured], known: Collection[str] = ()) -> list[float]:
    """Errors of every row by a device calibrated on the others."""
    found = []
    for number, row in enumerate(track(rows, "leaving out a row")):
        others = [*rows[:number], *rows[number + 1 :]]
        fitted = calibrate(device, others, "the other rows", known).device
        found.append(float(step_seconds(row.workload, [fitted])[0] / row.seconds - 1))
    return found


def with_error(device: Device, held: Sequence[float], name: str) -> Device:
    """The device with how far steps are off that it was not fitted to: nine of ten are nearer."""
    most = float(np.quantile(np.abs(held), NINE_OF_TEN, method="higher"))
    source = f"{len(held)} steps of {name}, each by a device fitted to the others"
    return device.model_copy(
        update={"step_error": Share(value=min(1.0, max(LEAST_ERROR, round(most, 3))), source=source)}
    )


def _show_constants(found: Calibration) -> None:
    constants = [(name, f"{found.before[name]:.4g}", f"{value:.4g}") for name, value in found.after.items()]
    output.print(Table("constants", [*texts("constant"), *figures("before", "calibrated")], constants))


def _show(found: Calibration, rows: Sequence[Measured], held: Sequence[float], device: Device) -> None:
    _show_constants(found)
    lines = []
    for row, error in zip(rows, held, strict=True):
        before, after = (step_seconds(row.workload, [one])[0] / row.seconds - 1 for one in (device, found.device))
        lines.append((row.name, f"{row.seconds:.3f}", *(f"{100 * value:+.1f}%" for value in (before, after, error))))
    columns = figures("measured s", "before", "calibrated", "left out")
    output.print(Table("errors of predicted steps", [*texts("run"), *columns], lines))
    sizes = 100 * np.abs(held)
    output.print(f"left out: mean {sizes.mean():.1f}%, median {np.median(sizes):.1f}%, worst {sizes.max():.1f}%")
