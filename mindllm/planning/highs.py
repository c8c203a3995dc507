"""HiGHS for the planner: silent, on one core, with a deadline."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading

import highspy

from mindllm.deadline import OutOfTime, now

PATIENCE = 0.2  # seconds
_lock = threading.Lock()
_banner_printed = False


def new_solver() -> highspy.Highs:
    """Return a solver that prints nothing and runs on one core."""
    global _banner_printed
    with _lock:
        if not _banner_printed:
            _discard_banner()
            _banner_printed = True
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver


def _discard_banner() -> None:
    """Create a solver with standard output closed: HiGHS 1.16 prints a banner for the first solver of a process."""
    sys.stdout.flush()
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        highspy.Highs()
        ctypes.CDLL(None).fflush(None)  # C's own buffer, which would be written later
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def run_until(solver: highspy.Highs, deadline: float, latest: float = math.inf) -> None:
    """Run HiGHS until it has an answer or ``deadline``; its own limit counts from its first run.

    Mixed-integer programs rarely check the clock. One that still runs :data:`PATIENCE` after ``latest`` is abandoned in its
    thread, and must not be used again.

    Raises:
        OutOfTime: the solver was abandoned.
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
