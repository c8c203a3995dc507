"""How the C library of a compiling process keeps small pieces of memory that are freed.

MindSpore's compiler makes and frees millions of nodes of a few hundred bytes. glibc keeps seven of each size for a thread before
it sorts the others into its lists, and joins neighbours over and over; with room for all of them, a compile spends about a tenth
less of a processor, and takes a few per cent more memory (docs/dry_run.md, Measured).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
KEEP_FREED = "glibc.malloc.tcache_count=65000"


def allocation_variables() -> Mapping[str, str]:
    """Return what must be in the environment when a compiling process starts; what the user says there himself stands."""
    said = os.environ.get(VARIABLE, "")
    return {} if "tcache_count" in said else {VARIABLE: ":".join(filter(None, [said, KEEP_FREED]))}
