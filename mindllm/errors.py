"""Errors that are part of the interface: what a command line prints, and the exit code it ends with.

A ``UserError`` is a mistake in what the user gave (a key, a file, a combination): it is printed without a traceback and ends
with exit code 2. ``RunFailed`` is a failure explained without one, too: 1. ``CheckFailed``: a check ran well and says no, 3.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input. The message says what was wrong, where, and what to write instead."""

    exit_code = 2


class RunFailed(Exception):
    """The run itself failed (a loss that is not finite, a disk that is full) and the message says why: exit code 1."""

    exit_code = 1


class CheckFailed(Exception):
    """A check ran to its end and its answer is no."""

    exit_code = 3


LONGEST_PART = 300  # characters of a key, an option, a line
LONGEST_LINE, MOST_LINES = 4000, 100  # of a message


def bounded(text: str, longest: int = LONGEST_LINE, most: int = MOST_LINES) -> str:
    """A message of at most so many lines of at most so many characters; of longer ones beginning and end stay, and it says so."""
    lines = text.split("\n")
    left_out = [f"and {len(lines) - most:,} more lines"] if len(lines) > most else []
    return "\n".join([*(_without_middle(line, longest) for line in lines[:most]), *left_out])


def _without_middle(line: str, longest: int) -> str:
    half = longest // 2
    return line if len(line) <= longest else f"{line[:half]}…({len(line) - 2 * half:,} characters)…{line[-half:]}"


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the candidate closest to ``word``, or the list of candidates when none is close."""
    names = sorted(set(candidates))
    close = difflib.get_close_matches(word[:LONGEST_PART], names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {', '.join(names)}" if names else ""


def shortened(value: object, most: int = 60) -> str:
    """A value of a user's file as printable text of bounded length, on one line."""
    text = value[: most + 1] if isinstance(value, str) else repr(value)[: most + 1]
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else f"{text[:most]}…"
