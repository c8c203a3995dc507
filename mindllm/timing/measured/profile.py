"""Seconds of a step from MindSpore's profiler: ``step_trace_time.csv``, whose times are microseconds."""

from __future__ import annotations

import math
from pathlib import Path

from mindllm.errors import UserError
from mindllm.outside import read_rows

STEP_FILE = "step_trace_time.csv"
PARTS = ("Computing", "Communication(Not Overlapped)", "Free")
MICROSECOND = 1e-6


def profiled_step(path: Path) -> float:
    """The mean of all steps but the first, which also warms up.

    Raises:
        UserError: there is no such file, or it is of another version of the profiler.
    """
    file = path / STEP_FILE if path.is_dir() else path
    try:
        rows = read_rows(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    missing = [part for part in PARTS if not rows or part not in rows[0]]
    if missing:
        raise UserError(
            f"{file}: has no column {missing[0]}: it is not a {STEP_FILE}, or of another version of the profiler"
        )
    try:
        steps = [MICROSECOND * sum(float(row[part]) for part in PARTS) for row in rows]
    except ValueError:
        steps = [math.inf]
    if not all(map(math.isfinite, steps)):
        raise UserError(f"{file}: a time of a step is not a number")
    kept = steps[1:] or steps
    return sum(kept) / len(kept)
