"""Whichever scheduler of a cluster has started this process: Slurm, or Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from mindllm.launch.clusters.kubernetes import pod_of_a_job
from mindllm.launch.clusters.placement import Placement
from mindllm.launch.clusters.slurm import slurm_task

OF_A_TASK = (
    *("SLURM_STEP_NUM_TASKS", "VC_TASK_INDEX", "MS_NODE_RANK", "MS_LOCAL_WORKER"),
    *("MS_WORKER_NUM", "MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT"),
)
"""Variables that make a process a task of a scheduler's job, or one of the ranks that the Ascend operator has begun."""


def placement_of(environment: Mapping[str, str] = os.environ) -> Placement | None:
    """Return the task that this process is; None where no scheduler has started it.

    Raises:
        UserError: the scheduler says something that cannot be used.
    """
    return slurm_task(environment) or pod_of_a_job(environment)


def forget_task(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let processes that this one starts be none of the scheduler's tasks: they get their places from here."""
    for name in OF_A_TASK:
        environment.pop(name, None)
