"""What tells MindSpore that a process belongs to a job, and the environment of one that does not.

A process that compiles or simulates a rank stands alone, also where the command that started it runs in a rank of a job, or in a
pod of the Ascend operator: with a role MindSpore looks for the job's scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

OF_A_JOB = (
    "MS_ROLE",
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
    "MS_WORKER_NUM",
    "MS_SERVER_NUM",
    "MS_WORKER_IP",
    "MS_NODE_ID",
    "RANK_TABLE_FILE",
    "OMPI_COMMAND",
    "OMPI_COMM_WORLD_RANK",
)


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the place in a job that it may hold."""
    return {name: value for name, value in environment.items() if name not in OF_A_JOB}


def leave_job() -> None:
    """Take this process out of a job, before MindSpore is used."""
    for name in OF_A_JOB:
        os.environ.pop(name, None)
