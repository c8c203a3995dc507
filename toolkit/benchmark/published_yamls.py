"""MindFormers' YAMLs as they are, beside the speeds that its cards of models publish for them.

Each YAML is read as ``mindllm time`` reads it, and timed as MindFormers itself runs it, by the shipped device. Nothing is
fitted to these rows; ``fitted`` are those that the device was calibrated on, from their columns (``throughput.csv``). A card
names a YAML and a machine and says no more, so a speed that is of another layout than its YAML's cannot be told. All are kept.

``--releases`` names check-outs of MindFormers: ``git clone --branch r1.3.0 https://gitee.com/mindspore/mindformers r1.3.0``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.configured import mindformers_workload
from mindllm.timing.costs.attention import in_one_kernel
from mindllm.timing.device import DEFAULT, Device, read_device
from mindllm.timing.step import step_time
from toolkit.benchmark.published_steps import Row, read_rows
from toolkit.benchmark.report import write_markdown

CARDS, TABLES = "mindformers_cards.csv", "throughput.csv"
FUSED, COMPOSED, ADAPTERS = "attention in one kernel", "composed attention", "adapters"
WITHIN = 0.13  # what is said of a predicted step (step_error)
EXAMPLES = """example:
  python -m toolkit.benchmark.published_yamls --data tests/ground_truth --releases DIR   # with r1.1.0, r1.2.0 and r1.3.0 in it
"""


@dataclass(frozen=True)
class Compared:
    """A row of a card: tokens a second and device, and those predicted; a reason in their place where there are none."""

    name: str
    kind: str
    fitted: bool
    published: float
    predicted: float
    reason: str = ""

    @property
    def error(self) -> float:
        """Of the step: above nothing where it is predicted too slow."""
        return self.published / self.predicted - 1


def compare(rows: Sequence[Row], releases: Path, fitted: set[tuple[str, str]]) -> Iterator[Compared]:
    """Each row of the cards whose release is there.

    Args:
        rows: of ``mindformers_cards.csv``.
        releases: a directory with check-outs by the names of releases.
        fitted: release and speed of the rows that the device was calibrated on.
    """
    device = read_device(DEFAULT)
    for row in rows:
        path = releases / row["release"] / row["yaml"]
        if path.is_file():
            yield _compared(row, path, device, (row["release"], row["tokens_per_s_per_device"]) in fitted)


def lines_of(found: Sequence[Compared]) -> list[tuple[str, str, str, str, str]]:
    """Cells of the table: rows in the order of the cards, then those that are not timed, then each kind in short."""
    lines = [
        (
            one.name,
            one.kind + ", fitted" * one.fitted,
            f"{one.published:,.0f}",
            f"{one.predicted:,.0f}",
            f"{100 * one.error:+.1f}%",
        )
        for one in found
        if not one.reason
    ]
    lines += [(one.name, one.reason, f"{one.published:,.0f}", "", "") for one in found if one.reason]
    timed = [one for one in found if not one.reason]
    for kind, members in (
        *(
            (kind, [one for one in timed if one.kind == kind and not one.fitted])
            for kind in (FUSED, COMPOSED, ADAPTERS)
        ),
        ("fitted", [one for one in timed if one.fitted]),
    ):
        errors = np.abs([one.error for one in members])
        if len(errors):
            within = f"{(errors <= WITHIN).sum()} of {len(errors)} within {100 * WITHIN:.0f}%"
            lines.append((f"median / {kind}", within, "", "", f"{100 * float(np.median(errors)):.1f}%"))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes it as a page."""
    parser = CommandParser(prog="python -m toolkit.benchmark.published_yamls", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the published tables, as CSV")
    parser.add_argument(
        "--releases", type=Path, required=True, metavar="DIR", help="check-outs, each called like its release"
    )
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    fitted = {
        (row["release"], row["tokens_per_s_per_device"]) for row in read_rows(options.data / TABLES) if not row["ep"]
    }
    found = list(compare(read_rows(options.data / CARDS), options.releases, fitted))
    if not found:
        raise UserError(f"--releases {options.releases}: holds none of the YAMLs; clone MindFormers r1.3.0 there")
    table = (
        "MindFormers' cards, by its own YAMLs",
        ("row", "kind", "published tokens/s/device", "predicted", "error of the step"),
    )
    lines = lines_of(found)
    output.print(Table(table[0], [*texts(*table[1][:2]), *figures(*table[1][2:])], lines))
    if options.markdown:
        command = "python -m toolkit.benchmark.published_yamls " + " ".join(arguments or sys.argv[1:])
        write_markdown(
            options.markdown, "Published speeds and YAMLs", __doc__ or "", command, [(*table, lines)], "What it says"
        )
    return 0


def _compared(row: Mapping[str, str], path: Path, device: Device, fitted: bool) -> Compared:
    name, published = f"{row['release']} {path.stem}, {row['hardware']}", float(row["tokens_per_s_per_device"])
    try:
        workload = mindformers_workload(load_config(path))
    except UserError:
        workload = None
    if workload is None:
        return Compared(name, "", fitted, published, 0.0, "does not convert")
    step = step_time(workload, device)
    specs = workload.architecture.specifications()
    in_a_kernel = all(in_one_kernel(spec.attention, workload.numerics) for spec in specs)
    kind = ADAPTERS if workload.architecture.pet else FUSED if in_a_kernel else COMPOSED
    return Compared(name, kind, fitted, published, step.tokens_per_device)


if __name__ == "__main__":
    run_command(main)
