"""A deadline is a moment of ``time.monotonic``; what takes long asks now and then whether it has passed."""

from __future__ import annotations

import time
from collections.abc import Callable

clock: Callable[[], float] = time.monotonic
"""All of the planner reads this clock; a test may put its own in its place."""


class OutOfTime(Exception):
    """The deadline passed before there was an answer."""


def now() -> float:
    """The present moment, in seconds."""
    return clock()


def passed(deadline: float) -> bool:
    """Whether it is later than ``deadline``."""
    return now() > deadline


def check(deadline: float) -> None:
    """Raises :class:`OutOfTime` after ``deadline``."""
    if passed(deadline):
        raise OutOfTime
