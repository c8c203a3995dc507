"""Errors of the interface, with the exit codes of commands; they are printed without a traceback.

``UserError``: invalid input (a key, a file, a combination), exit code 2. ``RunFailed``: a failure with a known reason, 1.
``CheckFailed``: a check completed and failed, 3.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]
ALIKE = 0.8  # of 1: similarity from which an unknown option or argument counts as misspelt
CLOSE = 0.6  # of 1: similarity from which a name is suggested
MOST_SUGGESTIONS = 5
MOST_SHOWN = 40  # largest number of mistakes shown for a configuration
FORM = re.compile(r"(?P<reason>.*?)(?: \(value .*?\))?(?:; (?P<advice>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Origin:
    """The place of a value: a line of a file, an option of the command line, or a function call.

    ``comment`` is the comment of the line, which gives the reason for the value.
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
    """A mistake: its place, key and value, and a message of the form ``reason (value ...); fix``."""

    origin: Origin | None
    path: KeyPath
    message: str
    value: Any = None

    def __str__(self) -> str:
        parts = [str(self.origin or ""), bounded(self.key, LONGEST_PART), bounded(self.message)]
        return ": ".join(part for part in parts if part)

    @property
    def file(self) -> str:
        """The file; empty for an option or a dictionary."""
        return self.origin.file if self.origin else ""

    @property
    def line(self) -> int | None:
        """The line of the file, starting at 1."""
        return self.origin.line if self.origin else None

    @property
    def option(self) -> str:
        """The option of the command line, the override or the function; empty for a file."""
        return self.origin.option if self.origin else ""

    @property
    def key(self) -> str:
        """The dotted key."""
        return dotted(self.path)

    @property
    def reason(self) -> str:
        """The reason of the message, without value and fix."""
        return self._part("reason")

    @property
    def advice(self) -> str:
        """The fix of the message; empty if the reason implies it."""
        return self._part("advice")

    def _part(self, name: str) -> str:
        match = FORM.fullmatch(self.message)
        return (match.group(name) or "") if match else ""


class UserError(Exception):
    """Invalid input. The message states the problem, its place and the fix.

    Attributes:
        problems: all mistakes of a configuration; the message may show fewer.
    """

    exit_code = 2

    def __init__(self, message: object = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, *problems: Problem) -> UserError:
        """Return the error of several mistakes; its message shows the first hundred."""
        return cls(bounded("\n".join(map(str, problems))), problems)

    @property
    def first(self) -> Problem:
        """The first mistake; without ``problems`` a mistake with the message only."""
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
        """The reason of the first mistake."""
        return self.first.reason

    @property
    def advice(self) -> str:
        """The fix of the first mistake."""
        return self.first.advice


class RunFailed(Exception):
    """The run failed for a reason that the message states, such as a loss that is not finite or a full disk: exit code 1."""

    exit_code = 1


class CheckFailed(Exception):
    """A check completed and failed: exit code 3."""

    exit_code = 3


LONGEST_PART = 300  # characters of a key, an option or a line
LONGEST_LINE, MOST_LINES = 4000, 100  # of a message


def bounded(text: str, longest: int = LONGEST_LINE, most: int = MOST_LINES) -> str:
    """Return a message with at most ``most`` lines of ``longest`` characters; longer lines keep their start and end."""
    lines = text.split("\n")
    omitted = [f"and {len(lines) - most:,} more lines"] if len(lines) > most else []
    return "\n".join([*(_without_middle(line, longest) for line in lines[:most]), *omitted])


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
    """Return a value as text; its type if it cannot be converted, such as a deeply nested list or a huge integer."""
    try:
        return convert(value)
    except Exception:
        return f"<{type(value).__name__}>"


def shortened(value: object, most: int = 60) -> str:
    """Return a value as printable text of bounded length on one line."""
    text = value[: most + 1] if isinstance(value, str) else text_of(value, repr)[: most + 1]
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else f"{text[:most]}…"
