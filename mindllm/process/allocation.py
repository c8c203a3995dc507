"""How the C library of a compiling process keeps memory, and in pages of which size.

MindSpore's compiler makes and frees millions of nodes of a few hundred bytes. glibc keeps seven of each size for a thread before
it sorts the others into its lists, and joins neighbours over and over; with room for all of them, a compile spends about a tenth
less of a processor, and takes a few per cent more memory. Reading those nodes again and again misses the processor's table of
pages less often where pages have 2 MB: where the system gives such pages to those who ask (``madvise``, as Debian and Ubuntu
are set), a simulated stage takes a seventh less time. With a limit for trimming of its own, glibc goes on mapping large blocks
each by itself, so that their memory goes back when they are freed, and no more is taken (docs/dry_run.md, Measured).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
KEEP_FREED = "glibc.malloc.tcache_count=65000"
LARGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=4000000000"  # ignored by glibc before 2.35


def allocation_variables() -> Mapping[str, str]:
    """Return what must be in the environment when a compiling process starts; what the user says there himself stands."""
    said = os.environ.get(VARIABLE, "")
    ours = [tunables for tunables in (KEEP_FREED, LARGE_PAGES) if tunables.partition("=")[0] not in said]
    return {VARIABLE: ":".join(filter(None, [said, *ours]))} if ours else {}
