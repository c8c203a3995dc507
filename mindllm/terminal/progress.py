"""Progress of library functions: they call back, and never draw."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")
SECONDS_BETWEEN_CALLS = 0.1


class Progress(Protocol):
    """A callback for the current work, the finished count and the total (None: unknown)."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None: ...


def unwatched(what: str, done: int = 0, total: int | None = None) -> None:
    """Do nothing."""


def counted(items: Sequence[Item], what: str, progress: Progress) -> Iterator[Item]:
    """Yield ``items`` and report the finished count periodically and at the end."""
    last_call = -SECONDS_BETWEEN_CALLS
    for done, item in enumerate(items):
        if (now := time.monotonic()) - last_call >= SECONDS_BETWEEN_CALLS:
            progress(what, done, len(items))
            last_call = now
        yield item
    progress(what, len(items), len(items))
