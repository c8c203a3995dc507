"""Fork a process in which MindSpore compiles, by the functions that ``mindspore.multiprocessing`` calls.

When the compiler asks for the rank, a thread schedules the inference of types. A fork lacks this thread and would wait forever.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_SECONDS = 10.0
POLL_SECONDS = 0.001
TASKS = Path("/proc/self/task")


def end_threads() -> None:
    """End the threads of MindSpore's compiler, and wait for that. A thread that holds a lock would leave it locked in forks.

    MindSpore starts queues of its runtime instead, which wait for work that the front end never submits.

    Raises:
        RuntimeError: the threads do not end.
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
    """Start MindSpore's threads again in a fork. MindSpore would also switch the fork to the CPU, which is undone."""
    from mindspore._c_expression import MSContext, fork_utils, ms_ctx_param

    context = MSContext.get_instance()
    target = context.get_param(ms_ctx_param.device_target)
    fork_utils.child_at_fork()
    context.set_device_target_inner(target)
