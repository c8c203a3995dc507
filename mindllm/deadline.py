"""Deadlines: moments of ``time.monotonic`` that long computations check periodically."""

from __future__ import annotations

import time
from collections.abc import Callable

clock: Callable[[], float] = time.monotonic
"""The clock of the planner, which tests may replace."""


class OutOfTime(Exception):
    """The deadline passed before a result was found."""


def now() -> float:
    """Return the current time in seconds."""
    return clock()


def passed(deadline: float) -> bool:
    """Return True if the deadline has passed."""
    return now() > deadline


def check(deadline: float) -> None:
    """Raise :class:`OutOfTime` after the deadline."""
    if passed(deadline):
        raise OutOfTime
