"""Whichever scheduler of a cluster has started this process: Slurm, or Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mindllm.launch.clusters.kubernetes import pod_of_a_job
from mindllm.launch.clusters.placement import Placement
from mindllm.launch.clusters.slurm import slurm_task


def placement_of(environment: Mapping[str, str] = os.environ) -> Placement | None:
    """Return the task that this process is; None where no scheduler has started it.

    Raises:
        UserError: the scheduler says something that cannot be used.
    """
    return slurm_task(environment) or pod_of_a_job(environment)
