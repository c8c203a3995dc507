"""Check whether every public training YAML of MindFormers fits the device that it is written for.

Each YAML that converts gets one row: the limit of its ``max_device_memory``, the peak of its fullest stage by formula, and,
with ``--dry-run``, the peak of the same stage in MindSpore's dry run (used, and actual with fragments). A YAML whose model card
publishes a speed has run on a device, so it must fit; any other YAML may be an example that nobody ran.

A run fits if its used peak is within the whole limit, as ``mindllm prove`` decides: a device remaps idle pages, so fragments do
not count. Where there is no dry run, the formula stands for the used peak. Commands that have the formula alone
(``prove --quick``, ``search``) keep 5% of the limit free. The summary counts what they reject, too.

YAMLs that describe the same run (the copies of several releases) are one row. A dry run is bounded by ``--seconds``; results
are stored in ``--keep`` after each YAML, so an interrupted benchmark continues where it stopped. ``--releases`` names a
directory of MindFormers checkouts: ``git clone --branch r1.3.0 https://gitee.com/mindspore/mindformers releases/r1.3.0``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.terminal.console import error_console, output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.configured import workload_of
from mindllm.timing.memory import stage_bytes
from mindllm.timing.verdict import usable_memory
from mindllm.units import GIB, MIB
from toolkit.benchmark.mindformers_yamls import convert_all
from toolkit.benchmark.published_steps import read_rows
from toolkit.benchmark.report import Tables, keep_rows, kept_rows, write_markdown

CARDS = "mindformers_cards.csv"
COLUMNS = (
    "YAML",
    "parameters",
    "published",
    "stage",
    "limit",
    "formula",
    "dry run",
    "actual",
    "formula/dry run",
    "fits",
)
EXAMPLES = """example:
  python -m toolkit.benchmark.published_fit --releases DIR                               # by formula, seconds
  python -m toolkit.benchmark.published_fit --releases DIR --dry-run --keep fit.json     # hours
"""


@dataclass(frozen=True)
class Fit:
    """Memory of the fullest stage of a published YAML.

    Attributes:
        digest: of everything that decides the memory; rows of ``--keep`` are found by it.
        copies: number of files that describe this run.
        parameters: type of the stored parameters, as the YAML says.
        speed: published tokens/s/device, or None.
        limit, formula, used, actual: bytes; ``used`` and ``actual`` are None without a dry run.
        error: why there is no dry run, or an empty string.
    """

    digest: str
    name: str
    copies: int
    parameters: str
    speed: float | None
    stage: int
    stages: int
    limit: float
    formula: float
    used: float | None = None
    actual: float | None = None
    error: str = ""

    @property
    def fits(self) -> bool:
        """Return True if the used peak is within the limit, by the formula where there is no dry run."""
        return (self.used or self.formula) <= self.limit


def estimate(releases: Path, speeds: dict[tuple[str, str], float]) -> Iterator[Fit]:
    """Yield the formula's estimate of every distinct run below ``releases``, the largest share of its limit first.

    Args:
        releases: directory whose subdirectories are checkouts named after their release.
        speeds: published tokens/s/device by release and path of the YAML.
    """
    runs: dict[str, list[Fit]] = {}
    for result in convert_all([releases]):
        if result.reason or not result.digest:
            continue
        fit = estimate_file(Path(result.file), releases, speeds)
        runs.setdefault(fit.digest, []).append(fit)
    merged = [merge_copies(copies) for copies in runs.values()]
    yield from sorted(merged, key=lambda fit: -fit.formula / fit.limit)


def estimate_file(path: Path, releases: Path, speeds: dict[tuple[str, str], float]) -> Fit:
    """Return the formula's estimate of one YAML.

    Raises:
        UserError: the run has something that the formula does not model.
    """
    config = load_config(path)
    workload = workload_of(config)
    peaks = stage_bytes(workload)
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    limit = float(config.context.device_memory)
    keys = config.mindformers_keys or {}
    types = {str(value) for key, value in keys.items() if key.endswith("param_init_type")}
    name = path.relative_to(releases)
    # Without the file's name, copies of a YAML in several releases are the same run.
    digest = hashlib.sha256(repr((workload, limit, sorted(types))).encode()).hexdigest()[:16]
    speed = speeds.get((name.parts[0], str(Path(*name.parts[1:]))))
    return Fit(
        digest, str(name), 1, "/".join(sorted(types)) or "default", speed, fullest, len(peaks), limit, peaks[fullest]
    )


def merge_copies(copies: Sequence[Fit]) -> Fit:
    """Return one row for several YAMLs of the same run: named after one with a published speed, if there is any."""
    first = max(copies, key=lambda fit: fit.speed is not None)
    return Fit(**{**asdict(first), "copies": len(copies)})


def dry_run(fit: Fit, releases: Path, seconds: float) -> Fit:
    """Return the row with the peaks of its fullest stage in MindSpore's dry run, or with the reason why there are none."""
    command = [
        sys.executable, "-m", "mindllm.main", "dry-run", str(releases / fit.name), "--stages", str(fit.stage), "--json",
        "--workers", "1", "--advice", "0",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [*command, "--output", directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a timeout ends the simulations as well
        )
        try:
            printed, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()
            return Fit(**{**asdict(fit), "error": f"no answer within {seconds:.0f} s"})
    if process.returncode not in (0, 3):
        lines = errors.strip().splitlines() or ["no message"]
        return Fit(**{**asdict(fit), "error": lines[-1][:200]})
    stage: dict[str, Any] = json.loads(printed)["stages"][0]
    peaks = {"used": stage["used_peak_mb"] * MIB, "actual": stage["actual_peak_mb"] * MIB}
    return Fit(**{**asdict(fit), **peaks})


def table_rows(fits: Sequence[Fit]) -> list[tuple[str, ...]]:
    """Return the cells of the table, in GB of 2**30 bytes."""
    return [
        (
            fit.name + (f" (and {fit.copies - 1} more)" if fit.copies > 1 else ""),
            fit.parameters,
            f"{fit.speed:,.0f}" if fit.speed else "",
            f"{fit.stage} of {fit.stages}",
            *(f"{size / GIB:.1f}" if size else "" for size in (fit.limit, fit.formula, fit.used, fit.actual)),
            f"{100 * (fit.formula / fit.used - 1):+.1f}%" if fit.used else fit.error,
            "yes" if fit.fits else "no",
        )
        for fit in fits
    ]


def summary_rows(fits: Sequence[Fit]) -> list[tuple[str, str]]:
    """Return what the table says in total: runs that do not fit, and the error of the formula."""
    files = sum(fit.copies for fit in fits)
    missing = [fit for fit in fits if not fit.fits]
    rejected = [fit for fit in fits if fit.formula > usable_memory(fit.limit)]
    errors = [abs(fit.formula / fit.used - 1) for fit in fits if fit.used]
    rows = [
        ("YAMLs, distinct runs", f"{files}, {len(fits)}"),
        ("YAMLs that do not fit, distinct runs", f"{sum(fit.copies for fit in missing)}, {len(missing)}"),
        ("of these with a published speed", str(sum(fit.speed is not None for fit in missing))),
        ("by formula with 5% reserved", f"{sum(fit.copies for fit in rejected)}, {len(rejected)}"),
    ]
    if errors:
        figure = f"mean {100 * statistics.mean(errors):.1f}%, largest {100 * max(errors):.1f}%, of {len(errors)} runs"
        rows.append(("error of the formula against the dry run", figure))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it as a page."""
    parser = CommandParser(prog="python -m toolkit.benchmark.published_fit", description=__doc__, epilog=EXAMPLES)
    parser.add_argument(
        "--releases",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkouts of MindFormers, each named after its release",
    )
    parser.add_argument(
        "--data", type=Path, default=Path("tests/ground_truth"), metavar="DIR", help=f"directory of {CARDS}"
    )
    parser.add_argument("--dry-run", action="store_true", help="simulate the fullest stage of each run, too")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of a dry run (default: 600)")
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="start no dry run after this time (default: no limit)",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="only YAMLs whose path contains one of these"
    )
    parser.add_argument("--keep", type=Path, metavar="JSON", help="file with results, read and extended")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    speeds = {
        (row["release"], row["yaml"]): float(row["tokens_per_s_per_device"]) for row in read_rows(options.data / CARDS)
    }
    fits = [fit for fit in estimate(options.releases, speeds) if any(text in fit.name for text in options.only or [""])]
    if not fits:
        raise UserError(
            f"--releases {options.releases}: no YAML of MindFormers that converts; clone release r1.3.0 there"
        )
    if options.dry_run:
        fits = dry_run_all(fits, options.releases, options.seconds, options.keep, options.budget)
    rows = table_rows(fits)
    output.print(Table("Public YAMLs", [*texts(*COLUMNS[:2]), *figures(*COLUMNS[2:])], rows))
    output.print(Table("In total", [*texts("figure"), *figures("value")], summary_rows(fits)))
    if options.markdown:
        command = "python -m toolkit.benchmark.published_fit " + " ".join(arguments or sys.argv[1:])
        total: Tables = [("In total", ("figure", "value"), summary_rows(fits))]
        tables = [*total, ("Public YAMLs", COLUMNS, rows)]
        write_markdown(options.markdown, "Published YAMLs and memory", __doc__ or "", command, tables, "Causes")
    return 0


def dry_run_all(
    fits: Sequence[Fit], releases: Path, seconds: float, keep: Path | None, budget: float = math.inf
) -> list[Fit]:
    """Return all rows, with the dry runs that are stored in ``keep`` or end within the budget.

    Args:
        fits: rows by formula.
        releases: directory of the checkouts.
        seconds: time limit of one dry run.
        keep: file of results; each new one is stored at once.
        budget: seconds after which no further dry run starts.
    """
    stored = {row["digest"]: row for row in kept_rows(keep, "digest", ())}
    start = time.monotonic()
    for number, fit in enumerate(fits, 1):
        # A dry run that failed or took too long is tried again.
        if stored.get(fit.digest, {"error": "missing"})["error"] and time.monotonic() - start < budget:
            error_console.print(f"{number} of {len(fits)}: {fit.name}")
            stored[fit.digest] = asdict(dry_run(fit, releases, seconds))
            keep_rows(keep, list(stored.values()))
    measured = ("used", "actual", "error")
    return [
        Fit(**{**asdict(fit), **{key: stored[fit.digest][key] for key in measured}}) if fit.digest in stored else fit
        for fit in fits
    ]


if __name__ == "__main__":
    run_command(main)
