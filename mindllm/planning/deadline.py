"""A deadline is a moment of ``time.monotonic``; what takes long asks now and then whether it has passed."""

from __future__ import annotations

import time

import highspy


class OutOfTime(Exception):
    """The deadline passed before there was an answer."""


def check(deadline: float) -> None:
    """Raises :class:`OutOfTime` after ``deadline``."""
    if time.monotonic() > deadline:
        raise OutOfTime


def run_until(solver: highspy.Highs, deadline: float) -> None:
    """Runs HiGHS until it has an answer or ``deadline``; its own limit counts from the first run on."""
    if deadline == float("inf"):
        solver.setOptionValue("time_limit", highspy.kHighsInf)
    else:
        solver.setOptionValue("time_limit", solver.getRunTime() + max(0.0, deadline - time.monotonic()))
    solver.run()
