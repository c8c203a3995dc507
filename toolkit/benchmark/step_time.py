"""How far predicted steps are from published ones. Zero-shot: devices as they were described before any row was seen. Calibrated:
the few constants of ``mindllm.timing.measured.calibrate`` fitted to other rows than those that are judged.

| table | rows | how |
|---|---|---|
| atlas | MindFormers' tables of throughput on Atlas A2 | zero-shot; leave-one-out: each row by a device fitted to all others |
| korthikanti | Korthikanti et al. 2022, tables 3 and 5, A100 | zero-shot |
| vtrain | Bang et al. 2024, several nodes of A100 | zero-shot; held out: random 32 rows calibrate, the others are judged |
| zero_bubble | Qi et al. 2024, tables 4 and 6: throughput of 1F1B from measured passes | zero-shot |
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.terminal.console import output, track
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.device import Device, Share, read_device
from mindllm.timing.measured.calibrate import Measured, calibrate, uncalibrated
from mindllm.timing.step import step_seconds
from toolkit.benchmark.published_steps import korthikanti, read_atlas, read_rows, vtrain
from toolkit.benchmark.report import Tables, write_markdown
from toolkit.benchmark.zero_bubble_steps import zero_bubble_rows

EXAMPLES = """example:
  python -m toolkit.benchmark.step_time --data DIR --markdown docs/benchmarks/step_time.md
  python -m toolkit.benchmark.step_time --data DIR --tables korthikanti
"""
TABLES = ("atlas", "korthikanti", "vtrain", "zero_bubble")
FEW = 32  # rows that calibrate vTrain's cluster
FOURTH = 12.5e9  # bytes a second of vTrain's cluster: four ports of 200 Gbit/s for eight devices
Lines = list[tuple[str, ...]]


def errors(rows: Sequence[Measured], device: Device) -> np.ndarray:
    """Predicted over measured seconds, less one, ``[rows]``."""
    return np.array([step_seconds(row.workload, [device])[0] / row.seconds - 1 for row in rows])


def summary(found: Iterable[float]) -> str:
    """Mean, median and worst of the amounts."""
    amounts = 100 * np.abs(np.array(list(found)))
    return f"{amounts.mean():.2f} / {np.median(amounts):.2f} / {amounts.max():.2f}%"


def atlas_table(data: Path) -> tuple[str, Sequence[str], Lines]:
    """Every Atlas row, zero-shot and left out."""
    device = uncalibrated(read_device("atlas_800t_a2"))
    table = [row for row in read_rows(data / "throughput.csv") if row["hardware"].startswith("Atlas")]
    given = [(row["model"], read_atlas(row)) for row in table]
    rows = [row for _, row in given if isinstance(row, Measured)]
    zero = errors(rows, device)
    left = np.array([
        errors([row], calibrate(device, [*rows[:number], *rows[number + 1 :]], "the other rows").device)[0]
        for number, row in enumerate(track(rows, "leaving out a row"))
    ])  # fmt: skip
    lines: Lines = [
        (
            row.name,
            _throughput(row),
            _throughput(row, one),
            f"{_signed(-one / (1 + one))}",
            _signed(-other / (1 + other)),
        )
        for row, one, other in zip(rows, zero, left, strict=True)
    ]
    lines += [(name, "", f"not modelled: {row}", "", "") for name, row in given if isinstance(row, str)]
    judged = [-values / (1 + values) for values in (zero, left)]
    lines.append(("mean / median / worst", "", "", *(summary(values) for values in judged)))
    columns = ("row", "published tokens/s/device", "zero-shot", "error, zero-shot", "error, left out")
    return "Atlas A2, MindFormers' tables", columns, lines


def _throughput(row: Measured, error: float = 0.0) -> str:
    return f"{row.workload.tokens / row.workload.strategy.device_num / row.seconds / (1 + error):,.0f}"


def korthikanti_table(data: Path) -> tuple[str, Sequence[str], Lines]:
    """The eight steps of Korthikanti et al."""
    rows = [found for row in read_rows(data / "korthikanti_step_time.csv") for found in korthikanti(row)]
    return (
        "A100, Korthikanti et al.",
        _SECONDS,
        _seconds_lines(rows, errors(rows, uncalibrated(read_device("a100_80g")))),
    )


_SECONDS = ("row", "measured s", "predicted s", "error, zero-shot")


def _seconds_lines(rows: Sequence[Measured], found: np.ndarray) -> Lines:
    lines: Lines = [
        (row.name, f"{row.seconds:.2f}", f"{row.seconds * (1 + error):.2f}", _signed(error))
        for row, error in zip(rows, found, strict=True)
    ]
    return [*lines, ("mean / median / worst", "", "", summary(found))]


def vtrain_table(data: Path, splits: int) -> tuple[str, Sequence[str], Lines]:
    """Rows of several nodes; the mean error of a row over the splits in which it was held out."""
    device = vtrain_cluster()
    rows = [vtrain(row) for row in read_rows(data / "vtrain_multi_node_a100.csv")]
    zero, held = errors(rows, device), list(_held_out(rows, device, splits))
    lines = _seconds_lines(rows, zero)
    for number in range(len(rows)):
        mine = [error for split in held for index, error in split.items() if index == number]
        lines[number] = (*lines[number], _signed(float(np.mean(mine))) if mine else "never held out")
    every = [error for split in held for error in split.values()]
    lines[-1] = (*lines[-1], summary(every) if every else "")
    return "A100, vTrain, several nodes", (*_SECONDS, f"error, held out ({splits} splits)"), lines


def vtrain_cluster() -> Device:
    """A100 with four ports of InfiniBand for eight devices, as vTrain's cluster has them; how groups share them is not known."""
    device = uncalibrated(read_device("a100_80g"))
    outer = device.links[-1]
    rate = outer.bandwidth.model_copy(update={"value": FOURTH, "source": "four ports for eight devices"})
    shared = Share(value=1.0, source="assumed: groups do not meet at ports")
    link = outer.model_copy(update={"bandwidth": rate, "part_groups": shared})
    return device.model_copy(update={"links": (*device.links[:-1], link)})


def _held_out(rows: Sequence[Measured], device: Device, splits: int) -> Iterator[dict[int, float]]:
    """Errors by row of what each split held out."""
    random = np.random.default_rng(0)
    for _ in track(range(splits), "calibrating on splits"):
        order = random.permutation(len(rows)).tolist()
        fitted = calibrate(device, [rows[number] for number in order[:FEW]], "a split").device
        found = errors([rows[number] for number in order[FEW:]], fitted)
        yield dict(zip(order[FEW:], found.tolist(), strict=True))


def _signed(error: float) -> str:
    return f"{100 * error:+.1f}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables, and writes them as a page."""
    parser = CommandParser(prog="python -m toolkit.benchmark.step_time", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the published tables, as CSV")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="which (default: all)")
    parser.add_argument("--splits", type=int, default=5, metavar="N", help="of vTrain's rows (default: %(default)s)")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        raise UserError(f"--data {options.data}: is not a directory")
    makers = {
        "atlas": lambda: atlas_table(options.data),
        "korthikanti": lambda: korthikanti_table(options.data),
        "vtrain": lambda: vtrain_table(options.data, options.splits),
        "zero_bubble": lambda: zero_bubble_rows(read_rows(options.data / "zero_bubble.csv")),
    }
    found: list[tuple[str, Sequence[str], Lines]] = []
    for name in options.tables:
        title, columns, lines = makers[name]()
        output.print(Table(title, [*texts(columns[0]), *figures(*columns[1:])], lines))
        found.append((title, columns, lines))
    if options.markdown:
        command = "python -m toolkit.benchmark.step_time " + " ".join(arguments or sys.argv[1:])
        pages: Tables = found
        write_markdown(options.markdown, "Predicted and published steps", __doc__ or "", command, pages)
    return 0


if __name__ == "__main__":
    run_command(main)
