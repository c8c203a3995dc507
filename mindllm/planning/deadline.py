"""A deadline is a moment of ``time.monotonic``; what takes long asks now and then whether it has passed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import highspy

clock: Callable[[], float] = time.monotonic
"""All of the planner reads this clock; a test may put its own in its place."""


PATIENCE = 0.2  # seconds


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


def run_until(solver: highspy.Highs, deadline: float, latest: float = math.inf) -> None:
    """Runs HiGHS until it has an answer or ``deadline``; its own limit counts from the first run on.

    Mixed-integer programs look at the clock seldom: one that is still running :data:`PATIENCE` behind ``latest`` is left to
    itself, in a thread, and must not be used again.

    Raises:
        OutOfTime: it was left to itself.
    """
    if deadline == math.inf:
        solver.setOptionValue("time_limit", highspy.kHighsInf)
    else:
        solver.setOptionValue("time_limit", solver.getRunTime() + max(0.0, deadline - now()))
    if latest == math.inf:
        solver.run()
        return
    runner = threading.Thread(target=solver.run, daemon=True)
    runner.start()
    runner.join(max(0.0, latest - now()) + PATIENCE)
    if runner.is_alive():
        raise OutOfTime
