"""``python -m toolkit.step_time calibrate``: a device's free constants from measured steps of one's own runs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import load_config
from mindllm.config.yaml_tree import write_yaml
from mindllm.console import output, track
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.tables import Table, figures, texts
from mindllm.timing.calibrate import Calibration, Measured, calibrate
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, Device, read_device
from mindllm.timing.step import step_seconds
from toolkit.step_time.profile import profiled_step

CONFIG, SECONDS, PROFILE = "config", "seconds", "profile"
FEWEST = 2
EXAMPLES = """example:
  python -m toolkit.step_time calibrate --measured steps.csv --device atlas_800t_a2 --output my_device.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits, says how well rows are predicted that were not given, and writes the device."""
    parser = CommandParser(
        prog="python -m toolkit.step_time calibrate",
        description="Fits the free constants of a device to measured steps. The error that is told is of rows left out, one "
        "after the other.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--measured",
        type=Path,
        required=True,
        metavar="CSV",
        help="columns config (a YAML) and seconds (of a step) or profile",
    )
    parser.add_argument("--device", default=DEFAULT, metavar="FILE", help="where to start (default: %(default)s)")
    parser.add_argument("--output", type=output_file, required=True, metavar="YAML", help="the calibrated device")
    options = parser.parse_args(arguments)
    device, rows = read_device(options.device), read_measured(options.measured)
    found = calibrate(device, rows, f"calibrated on {len(rows)} steps of {options.measured.name}")
    held = held_out(device, rows)
    with atomic_open(options.output) as file:
        file.write(write_yaml(found.device.model_dump(mode="json", exclude_none=False)))
    _show(found, rows, held, device)
    output.print(f"{options.output}: for --device")
    return 0


def read_measured(path: Path) -> list[Measured]:
    """The runs of a CSV; paths of their YAMLs are relative to it.

    Raises:
        UserError: a column, a file or a number is missing or makes no sense.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--measured {path}: {getattr(error, 'strerror', error)}") from None
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


def held_out(device: Device, rows: Sequence[Measured]) -> list[float]:
    """Errors of every row by a device calibrated on the others."""
    found = []
    for number, row in enumerate(track(rows, "leaving out a row")):
        others = [*rows[:number], *rows[number + 1 :]]
        fitted = calibrate(device, others, "the other rows").device
        found.append(float(step_seconds(row.workload, [fitted])[0] / row.seconds - 1))
    return found


def _show(found: Calibration, rows: Sequence[Measured], held: Sequence[float], device: Device) -> None:
    constants = [(name, f"{found.before[name]:.4g}", f"{value:.4g}") for name, value in found.after.items()]
    output.print(Table("constants", [*texts("constant"), *figures("before", "calibrated")], constants))
    lines = []
    for row, error in zip(rows, held, strict=True):
        before, after = (step_seconds(row.workload, [one])[0] / row.seconds - 1 for one in (device, found.device))
        lines.append((row.name, f"{row.seconds:.3f}", *(f"{100 * value:+.1f}%" for value in (before, after, error))))
    columns = figures("measured s", "before", "calibrated", "left out")
    output.print(Table("errors of predicted steps", [*texts("run"), *columns], lines))
    sizes = 100 * np.abs(held)
    output.print(f"left out: mean {sizes.mean():.1f}%, median {np.median(sizes):.1f}%, worst {sizes.max():.1f}%")


if __name__ == "__main__":
    run_command(main)
