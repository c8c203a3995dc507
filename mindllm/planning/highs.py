"""HiGHS as the planner uses it: silent, on one core, until a deadline."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading

import highspy

from mindllm.deadline import OutOfTime, now

PATIENCE = 0.2  # seconds
_first = threading.Lock()
_announced = False


def new_solver() -> highspy.Highs:
    """A solver that prints nothing and runs on one core."""
    global _announced
    with _first:
        if not _announced:
            _swallow_announcement()
            _announced = True
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver


def _swallow_announcement() -> None:
    """HiGHS 1.16 names itself on the standard output of a process when its first solver is made, whatever its options are."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
        ctypes.CDLL(None).fflush(None)  # C's own buffer, which would be written later
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


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
