"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "no", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, what was seen, and what to do where it is not good.

    ``unknown``: it could not be told, which keeps nobody from trying.
    """

    subject: str
    state: State
    seen: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.state:<8}{self.subject}: {self.seen}" + (f". {self.advice}" if self.advice else "")


def good(subject: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding(subject, "good", seen)


def bad(subject: str, seen: str, advice: str) -> Finding:
    """A run would fail."""
    return Finding(subject, "no", seen, advice)


def unknown(subject: str, seen: str, advice: str = "") -> Finding:
    """It could not be told."""
    return Finding(subject, "unknown", seen, advice)
