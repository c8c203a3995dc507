"""How a function of the library tells what it is doing: it calls back, and never draws."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is called now and then with what is being done, how many are done, and of how many (None: not known)."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None: ...


def unwatched(what: str, done: int = 0, total: int | None = None) -> None:
    """Do nothing: nobody looks."""
