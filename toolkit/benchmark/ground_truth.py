"""Every published step beside its prediction by the described devices as they are shipped, and how far each group is off.

Nothing is fitted here. ``toolkit.benchmark.step_time`` judges rows by devices that were not given them; this command shows at
once which group a change of the model of time makes better and which worse.

| group | rows | device |
|---|---|---|
| MindFormers, dense | its tables of throughput | atlas_800t_a2, calibrated on these rows |
| MindFormers, experts | the same; their routing from the YAML of the release | atlas_800t_a2 |
| ladder | Llama 2 13B tuned in six rungs, ``research/llama2_13b_tuning`` | atlas_800t_a2 |
| Korthikanti | Korthikanti et al. 2022, tables 3 and 5 | a100_80g, not calibrated |
| vTrain | Bang et al. 2024, several nodes | a100_80g with that cluster's ports, not calibrated |
| zero bubble | Qi et al. 2024, 1F1B from measured passes | a100_80g, not calibrated |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, Device, read_device
from mindllm.timing.measured.calibrate import Measured, uncalibrated
from mindllm.timing.step import step_seconds
from toolkit.benchmark.published_steps import Row, korthikanti, read_atlas, read_rows, vtrain
from toolkit.benchmark.report import Tables, data_options, write_markdown
from toolkit.benchmark.step_time import vtrain_cluster
from toolkit.benchmark.zero_bubble_steps import throughputs

LADDER = Path(__file__).parents[2] / "research" / "llama2_13b_tuning"
EXAMPLES = """example:
  python -m toolkit.benchmark.ground_truth --data tests/ground_truth
"""


@dataclass(frozen=True)
class Compared:
    """A published step: seconds, and what the model of time says."""

    group: str
    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less one: above nothing where the step is predicted too slow."""
        return self.predicted / self.published - 1


def compared(data: Path) -> list[Compared]:
    """All rows of the published tables below ``data``, group by group.

    Raises:
        UserError: a table is missing.
    """
    found = [*_mindformers(read_rows(data / "throughput.csv")), *_ladder(read_rows(data / "llama2_13b_tuning.csv"))]
    plain = uncalibrated(read_device("a100_80g"))
    steps = [one for row in read_rows(data / "korthikanti_step_time.csv") for one in korthikanti(row)]
    found += [_one("Korthikanti", one, plain) for one in steps]
    cluster = vtrain_cluster()
    found += [_one("vTrain", vtrain(row), cluster) for row in read_rows(data / "vtrain_multi_node_a100.csv")]
    return [*found, *_zero_bubble(read_rows(data / "zero_bubble.csv"))]


def _one(group: str, row: Measured, device: Device) -> Compared:
    return Compared(group, row.name, row.seconds, float(step_seconds(row.workload, [device])[0]))


def _mindformers(rows: Sequence[Row]) -> Iterator[Compared]:
    device = read_device(DEFAULT)
    for row in rows:
        step = read_atlas(row)
        if isinstance(step, Measured):
            group = "MindFormers, experts" if int(row["ep"] or 1) > 1 else "MindFormers, dense"
            yield _one(group, step, device)


def _ladder(rows: Sequence[Row]) -> Iterator[Compared]:
    device = read_device(DEFAULT)
    for row in rows:
        workload = workload_of(load_config(LADDER / f"step_{row['step']}.yaml"))
        seconds = workload.tokens / workload.strategy.device_num / float(row["tokens_per_s_per_device"])
        yield _one("ladder", Measured(f"rung {row['step']}", workload, seconds), device)


def _zero_bubble(rows: Sequence[Row]) -> Iterator[Compared]:
    device = uncalibrated(read_device("a100_80g"))
    for row in rows:
        for name, predicted in throughputs(row, device):
            if row[f"thr_{name}"]:
                at = f"{row['model']}, {row['p']} stages, {row['m']} micro-batches, {name}"
                yield Compared("zero bubble", at, 1 / float(row[f"thr_{name}"]), 1 / predicted)


def by_group(rows: Sequence[Compared]) -> Mapping[str, np.ndarray]:
    """Errors of every group, in the order of the rows."""
    return {
        group: np.array([row.error for row in rows if row.group == group])
        for group in dict.fromkeys(row.group for row in rows)
    }


def tables(rows: Sequence[Compared]) -> Tables:
    """A line for every row, and a line for every group."""
    lines = [
        (row.group, row.name, f"{row.published:.4g}", f"{row.predicted:.4g}", f"{100 * row.error:+.1f}%")
        for row in rows
    ]
    groups = [
        (
            group,
            str(len(errors)),
            *(f"{100 * value:.1f}%" for value in _sizes(errors)),
            f"{100 * np.mean(errors):+.1f}%",
        )
        for group, errors in by_group(rows).items()
    ]
    columns = ("group", "row", "published s", "predicted s", "error")
    summary = ("group", "rows", "mean", "median", "worst", "mean with its sign")
    return [("Rows", columns, lines), ("Groups, sizes of errors", summary, groups)]


def _sizes(errors: np.ndarray) -> tuple[float, float, float]:
    sizes = np.abs(errors)
    return float(sizes.mean()), float(np.median(sizes)), float(sizes.max())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints all rows and groups, and writes them as a page."""
    options = data_options("python -m toolkit.benchmark.ground_truth", __doc__, EXAMPLES, arguments)
    found = tables(compared(options.data))
    for title, columns, lines in found:
        words = 2 if title == "Rows" else 1
        output.print(Table(title, [*texts(*columns[:words]), *figures(*columns[words:])], lines))
    if options.markdown:
        command = "python -m toolkit.benchmark.ground_truth " + " ".join(arguments or sys.argv[1:])
        write_markdown(options.markdown, "Ground truth of the model of time", __doc__ or "", command, found)
    return 0


if __name__ == "__main__":
    run_command(main)
