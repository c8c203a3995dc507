"""Seconds of a step from MindSpore's profiler: ``step_trace_time.csv``, whose times are microseconds."""

from __future__ import annotations

import csv
from pathlib import Path

from mindllm.errors import UserError

FILE = "step_trace_time.csv"
PARTS = ("Computing", "Communication(Not Overlapped)", "Free")
MICROSECOND = 1e-6


def profiled_step(path: Path) -> float:
    """The mean of all steps but the first, which also warms up.

    Raises:
        UserError: there is no such file, or it is of another version of the profiler.
    """
    file = path / FILE if path.is_dir() else path
    try:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {getattr(error, 'strerror', error)}") from None
    missing = [part for part in PARTS if not rows or part not in rows[0]]
    if missing:
        raise UserError(
            f"{file}: has no column {missing[0]}: it is not a {FILE}, or of another version of the profiler"
        )
    try:
        steps = [MICROSECOND * sum(float(row[part]) for part in PARTS) for row in rows]
    except (TypeError, ValueError):
        raise UserError(f"{file}: a time of a step is not a number") from None
    kept = steps[1:] or steps
    return sum(kept) / len(kept)
