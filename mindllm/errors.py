"""Errors that are part of the interface: what a command line prints, and the exit code it ends with.

A ``UserError`` is a mistake in what the user gave (a key, a file, a combination): it is printed without a traceback and ends
with exit code 2. ``RunFailed`` is a failure explained without one, too: 1. ``CheckFailed``: a check ran well and says no, 3.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]
ALIKE = 0.8  # of 1, from which on an unknown option or argument is one of ours misspelt
CLOSE = 0.6  # of 1, from which on a name is taken for a misspelt one
MOST_SUGGESTIONS = 5
MOST_SHOWN = 40  # mistakes of one configuration
FORM = re.compile(r"(?P<reason>.*?)(?: \(value .*?\))?(?:; (?P<advice>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Origin:
    """A place: a line of a file, an option of the command line, or a function that is called.

    ``comment``: why the value is what it is, as the comment in the file says.
    """

    file: str = ""
    line: int | None = None
    option: str = ""
    comment: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.option:
            return bounded(self.option, LONGEST_PART)
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One mistake: where, which key, the value there, and a message ``reason (value …); what to write``."""

    origin: Origin | None
    path: KeyPath
    message: str
    value: Any = None

    def __str__(self) -> str:
        parts = [str(self.origin or ""), bounded(self.key, LONGEST_PART), bounded(self.message)]
        return ": ".join(part for part in parts if part)

    @property
    def file(self) -> str:
        """The file it is in; empty for an option or a dictionary."""
        return self.origin.file if self.origin else ""

    @property
    def line(self) -> int | None:
        """The line of the file, from 1 on."""
        return self.origin.line if self.origin else None

    @property
    def option(self) -> str:
        """The option of the command line, the override or the function that is given something wrong; empty for a file."""
        return self.origin.option if self.origin else ""

    @property
    def key(self) -> str:
        """The dotted key."""
        return dotted(self.path)

    @property
    def reason(self) -> str:
        """What is wrong, without the value and the advice."""
        return self._part("reason")

    @property
    def advice(self) -> str:
        """What to write instead; empty where the reason says it."""
        return self._part("advice")

    def _part(self, name: str) -> str:
        found = FORM.fullmatch(self.message)
        return (found.group(name) or "") if found else ""


class UserError(Exception):
    """Wrong input. The message says what was wrong, where, and what to write instead.

    Attributes:
        problems: the mistakes one by one, where the input is a configuration; all of them, though the message shows fewer.
    """

    exit_code = 2

    def __init__(self, message: object = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, *problems: Problem) -> UserError:
        """Return the error of some mistakes; its message shows the first hundred."""
        return cls(bounded("\n".join(map(str, problems))), problems)

    @property
    def first(self) -> Problem:
        """The first mistake; without a list of mistakes one that has the message alone."""
        return self.problems[0] if self.problems else Problem(None, (), str(self))

    @property
    def file(self) -> str:
        """The file of the first mistake."""
        return self.first.file

    @property
    def line(self) -> int | None:
        """The line of the first mistake."""
        return self.first.line

    @property
    def option(self) -> str:
        """The option, or override, of the first mistake."""
        return self.first.option

    @property
    def key(self) -> str:
        """The dotted key of the first mistake."""
        return self.first.key

    @property
    def value(self) -> Any:
        """The value of the first mistake."""
        return self.first.value

    @property
    def reason(self) -> str:
        """What is wrong in the first mistake."""
        return self.first.reason

    @property
    def advice(self) -> str:
        """What to write instead of the first mistake."""
        return self.first.advice


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


def dotted(path: KeyPath) -> str:
    """Return ``("callbacks", 0, "type")`` as ``callbacks.0.type``."""
    return ".".join(map(str, path))


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for a candidate close to ``word``, else a few candidates, the nearest first."""
    names = sorted(set(candidates))
    close = difflib.get_close_matches(word[:LONGEST_PART], names, n=1, cutoff=CLOSE)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {few(names, word)}" if names else ""


def few(names: Sequence[str], word: str = "") -> str:
    """Return at most :data:`MOST_SUGGESTIONS` of ``names``, those nearest to ``word`` first, and the number of others."""
    if word and len(names) > MOST_SUGGESTIONS:
        names = difflib.get_close_matches(word[:LONGEST_PART], names, n=len(names), cutoff=0.0)
    others = len(names) - MOST_SUGGESTIONS
    return ", ".join(names[:MOST_SUGGESTIONS]) + (f" and {others:,} more" if others > 0 else "")


def text_of(value: object, convert: Callable[[Any], str] = str) -> str:
    """Return a value as text; its type if it cannot be converted, as a list of thousands of levels, or a huge integer."""
    try:
        return convert(value)
    except Exception:
        return f"<{type(value).__name__}>"


def shortened(value: object, most: int = 60) -> str:
    """A value of a user's file as printable text of bounded length, on one line."""
    text = value[: most + 1] if isinstance(value, str) else text_of(value, repr)[: most + 1]
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else f"{text[:most]}…"
