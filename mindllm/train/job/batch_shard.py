"""Which rows of a batch a process reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShard:
    """The rows of every global batch that a process is given: part ``index`` of ``count`` equal ones."""

    index: int = 0
    count: int = 1


FULL_BATCH = BatchShard()
