"""Forking a process in which MindSpore compiles: its own functions for that, as ``mindspore.multiprocessing`` calls them.

By the time the compiler asks for the rank it has a thread that schedules the inference of types. A fork lacks it, and would wait
for it for ever.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_SECONDS = 10.0
POLL_SECONDS = 0.001
TASKS = Path("/proc/self/task")


def end_threads() -> None:
    """Has MindSpore end the threads of its compiler, and waits for that: one that holds a lock would leave it locked in forks.

    What MindSpore starts instead, queues of its runtime, waits for work that the front end never gives.

    Raises:
        RuntimeError: they do not end.
    """
    from mindspore._c_expression import fork_utils

    working = _threads() - {str(os.getpid())}
    fork_utils.prepare_before_fork()
    deadline = time.monotonic() + MOST_SECONDS
    while working & _threads():
        if time.monotonic() > deadline:
            raise RuntimeError("MindSpore's threads do not end: a process in which they work cannot be forked")
        time.sleep(POLL_SECONDS)


def _threads() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


def begin_threads() -> None:
    """Starts MindSpore's threads again, in a fork; MindSpore would also have it use a CPU from now on."""
    from mindspore._c_expression import MSContext, fork_utils, ms_ctx_param

    context = MSContext.get_instance()
    target = context.get_param(ms_ctx_param.device_target)
    fork_utils.child_at_fork()
    context.set_device_target_inner(target)
