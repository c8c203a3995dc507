"""Compare the memory of each rung of a published tuning ladder with the limit that the ladder ends at.

A published account tunes Llama 2 13B in six rungs of recomputation, with parameters in half precision and 57.2 GB of device
memory (``research/llama2_13b_tuning``). Each rung has the peak of every stage by formula, in both types of parameters, and, with
``--dry-run``, the peak of its fullest stage in MindSpore's dry run: used, and actual with fragments.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.configured import workload_of
from mindllm.timing.memory import stage_bytes
from mindllm.units import GIB, MIB
from toolkit.benchmark.report import write_markdown

RUNGS = Path("research/llama2_13b_tuning")
PUBLISHED = Path("tests/ground_truth/llama2_13b_tuning.csv")
LIMIT_GB = 57.2
TYPE_KEY = "--model.model_config.param_init_type"
HALF = "bfloat16"
COLUMNS = (
    "rung",
    "recomputation",
    "stages in float32",
    "stages in half precision",
    "limit",
    "dry run",
    "actual",
    "fits",
)


def stage_peaks(rung: str, dtype: str) -> tuple[float, ...]:
    """Return the peak of every stage of a rung by formula, in bytes, with parameters of this type."""
    config = load_config(RUNGS / f"step_{rung}.yaml", [f"{TYPE_KEY}={dtype}"])
    return tuple(stage_bytes(workload_of(config)))


def dry_run_peaks(rung: str, stage: int, seconds: float) -> tuple[float, float]:
    """Return the used and the actual peak of a stage in MindSpore's dry run, in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable, "-m", "mindllm.main", "dry-run", str(RUNGS / f"step_{rung}.yaml"), f"{TYPE_KEY}={HALF}",
            "--stages", str(stage), "--json", "--workers", "1", "--advice", "0", "--output", directory,
        ]  # fmt: skip
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"rung {rung}: no dry run within {seconds:.0f} s; write a larger --seconds") from None
    if process.returncode not in (0, 3):
        raise UserError(f"rung {rung}: {process.stderr.strip()[-200:]}")
    result: dict[str, Any] = json.loads(process.stdout)["stages"][0]
    return result["used_peak_mb"] * MIB, result["actual_peak_mb"] * MIB


def table_rows(simulated: Sequence[str], seconds: float) -> list[tuple[str, ...]]:
    """Return the cells of the table, in GB of 2**30 bytes; rungs in ``simulated`` are simulated, too."""
    rows = []
    for row in csv.DictReader(PUBLISHED.read_text(encoding="utf-8").splitlines()):
        rung = row["step"]
        wide, half = stage_peaks(rung, "float32"), stage_peaks(rung, HALF)
        stage = max(range(len(half)), key=half.__getitem__)
        peaks = dry_run_peaks(rung, stage, seconds) if rung in simulated else ()
        decisive = peaks[1] if peaks else max(half)
        cells = [f"{size / GIB:.1f}" for size in peaks] or ["", ""]
        stages = [" ".join(f"{size / GIB:.1f}" for size in sizes) for sizes in (wide, half)]
        fits = "yes" if decisive <= LIMIT_GB * GIB else "no"
        rows.append((rung, row["recompute"], *stages, f"{LIMIT_GB:.1f}", *cells, fits))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it as a page."""
    parser = CommandParser(prog="python -m toolkit.benchmark.tuning_ladder", description=__doc__)
    parser.add_argument(
        "--dry-run", nargs="*", default=[], metavar="RUNG", help="rungs whose fullest stage is simulated"
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="time limit of a dry run (default: 1800)")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    rows = table_rows(options.dry_run, options.seconds)
    output.print(Table("Llama 2 13B, GB", [*texts(*COLUMNS[:2]), *figures(*COLUMNS[2:])], rows))
    if options.markdown:
        command = "python -m toolkit.benchmark.tuning_ladder " + " ".join(arguments or sys.argv[1:])
        title = "Memory of the tuning ladder of Llama 2 13B"
        write_markdown(options.markdown, title, __doc__ or "", command, [("Rungs", COLUMNS, rows)], "Notes")
    return 0


if __name__ == "__main__":
    run_command(main)
