"""The process that tells MindSpore's workers of each other: ``python -m mindllm.launch.scheduler``, started by the launcher.

It ends with its workers or by its launcher. A cluster's scheduler sends SIGTERM to all processes of a task, this one among them,
and the ranks that then save a checkpoint still need it.
"""

import signal

from mindspore.communication import init

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    init()  # with MS_ROLE=MS_SCHED it returns when all workers have ended
