"""Environment variables of processes that compile or simulate ranks.

MindSpore's compiler allocates and frees millions of nodes of a few hundred bytes. By default glibc caches seven freed blocks per
size and thread, then sorts and merges the others. With a cache large enough for all of them a compile takes about 10% less
processor time and a few percent more memory. Pages of 2 MB cause fewer TLB misses: where the system provides them on request
(``madvise``, the default of Debian and Ubuntu), simulating a stage takes a seventh less time. An explicit trim threshold keeps
glibc mapping large blocks individually, so that their memory is returned when they are freed (docs/dry_run.md, Measured).

A process that compiles or simulates a rank belongs to no job, even if the command that starts it runs in a rank of a job or in a
pod of the Ascend operator: with a role set, MindSpore would connect to the scheduler of that job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

GLIBC_TUNABLES = "GLIBC_TUNABLES"
KEEP_FREED = "glibc.malloc.tcache_count=65000"
LARGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=4000000000"  # ignored by glibc before 2.35
JOB_VARIABLES = (
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
"""Variables by which MindSpore joins a job."""


def allocation_variables() -> Mapping[str, str]:
    """Return the variables a compiling process must start with. Tunables that the user has set take precedence."""
    user = os.environ.get(GLIBC_TUNABLES, "")
    missing = [tunables for tunables in (KEEP_FREED, LARGE_PAGES) if tunables.partition("=")[0] not in user]
    return {GLIBC_TUNABLES: ":".join(filter(None, [user, *missing]))} if missing else {}


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environment`` without the variables of a job."""
    return {name: value for name, value in environment.items() if name not in JOB_VARIABLES}


def leave_job() -> None:
    """Remove the variables of a job from this process, before MindSpore is used."""
    for name in JOB_VARIABLES:
        os.environ.pop(name, None)
