"""Which part of a job a process is, as the scheduler of a cluster says that started it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mindllm.errors import UserError

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"  # the devices that a scheduler gives a task, if it tells them apart
OF_A_RANK = ("MS_WORKER_NUM", "RANK_ID")  # what the processes have that a launcher has started


@dataclass(frozen=True)
class Placement:
    """A task of a job: what the launcher calls a node, although several may run on one machine.

    Attributes:
        scheduler: its name, for people.
        tasks: how many the job has.
        task: the number of this one, from 0.
        local_task: its number on its machine, from 0.
        address: where task 0 is reached by the others.
        port: of task 0, on which they find each other; the one after it is used, too.
        job: a name that stays the same when the scheduler starts the job again; empty: there is none.
        shares_machines: whether machines have several tasks, as with one for each device.
    """

    scheduler: str
    tasks: int
    task: int
    local_task: int
    address: str
    port: int
    job: str = ""
    shares_machines: bool = False

    def ranks_of_a_task(self, ranks: int) -> int:
        """How many of the job's ``ranks`` each task has; raises UserError where they cannot be shared evenly."""
        if ranks % self.tasks:
            raise UserError(
                f"{self.scheduler} has started {self.tasks} tasks, which cannot share {ranks} ranks evenly; start one "
                "task for each device, or one for each node"
            )
        return ranks // self.tasks

    def first_device(self, ranks: int, environment: Mapping[str, str] = os.environ) -> int:
        """The number of the first device of this task's ``ranks``, among those that its process sees."""
        visible = [device for device in environment.get(VISIBLE, "").split(",") if device]
        return 0 if len(visible) == ranks else self.local_task * ranks


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as a rank."""
    return all(name in environment for name in OF_A_RANK)
