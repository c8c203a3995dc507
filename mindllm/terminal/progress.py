"""How a function of the library tells what it is doing: it calls back, and never draws."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")
SECONDS_BETWEEN_CALLS = 0.1


class Progress(Protocol):
    """Is called now and then with what is being done, how many are done, and of how many (None: not known)."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None: ...


def unwatched(what: str, done: int = 0, total: int | None = None) -> None:
    """Do nothing: nobody looks."""


def counted(items: Sequence[Item], what: str, progress: Progress) -> Iterator[Item]:
    """Yield ``items`` and tell now and then how many are done, at the end that all are."""
    told = -SECONDS_BETWEEN_CALLS
    for done, item in enumerate(items):
        if (now := time.monotonic()) - told >= SECONDS_BETWEEN_CALLS:
            progress(what, done, len(items))
            told = now
        yield item
    progress(what, len(items), len(items))
