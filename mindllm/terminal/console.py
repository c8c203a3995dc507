"""Terminal output: the only module that prints with rich. Text is never markup, and control characters are escaped.

Names, paths, values and messages come from users, files and other programs. As markup, ``runs[lr=3e-4]`` would lose its end,
``run.yaml:100:`` would become an emoji, and ``[/x]`` would be an error. Styles are applied with
:func:`mindllm.terminal.text.styled`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import IO, Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Column
from rich.text import Text

from mindllm.terminal.json_text import SCHEMA, strict
from mindllm.terminal.text import styled, visible

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 30.0  # of progress, if standard error is not a terminal


class PlainConsole(Console):
    """A console that prints strings unchanged and lets the terminal wrap lines.

    ``table_width`` limits tables: the width of the terminal or ``COLUMNS``; None without a terminal.
    """

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, file: IO[str] | None = None, **options
    ) -> None:
        super().__init__(
            stderr=stderr, width=width, file=file, markup=False, emoji=False, highlight=False, soft_wrap=True, **options
        )
        self._width = width  # rich fixes COLUMNS when a console is created; read it at each use
        self.has_width = width is not None

    def on_broken_pipe(self) -> None:
        """Stop printing when the reader has gone; for standard output, end the command."""
        self.quiet = True
        if not self.stderr:
            raise BrokenPipeError

    @property
    def table_width(self) -> int | None:
        """Columns available to a table; None: unlimited."""
        return self.width if self.has_width or self.is_terminal or "COLUMNS" in os.environ else None

    def render_str(self, text: str, **options) -> Text:  # type: ignore[override]
        """Escape a string; rich calls this for all strings, including cells and titles."""
        options |= {"emoji": False, "markup": False, "highlight": False}
        return super().render_str(visible(text), **options)

    def status(self, status, **options) -> Status:  # type: ignore[override]
        """Return a status line with the current work; a string is not markup."""
        return PlainStatus(styled(status) if isinstance(status, str) else status, console=self, **options)


class PlainLines:
    """Prints a line periodically during long work: progress without a terminal."""

    def __init__(self, console: Console, line: Callable[[float], str]) -> None:
        self.console, self.line = console, line
        self._ended = threading.Event()
        self._began = time.monotonic()
        if not console.is_terminal:
            threading.Thread(target=self._run, args=(SECONDS_BETWEEN_LINES,), name="progress", daemon=True).start()

    def stop(self) -> None:
        """Stop printing lines."""
        self._ended.set()

    def _run(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            self.console.print(self.line(self.seconds))

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began


class PlainStatus(Status):
    """A status line with the current work."""

    _lines: PlainLines | None = None

    def start(self) -> None:
        """Show the line."""
        if self.console.is_terminal:
            super().start()
        self._lines = self._lines or PlainLines(self.console, lambda seconds: f"{self.status}, {_after(seconds)}")

    def stop(self) -> None:
        """Remove the line."""
        if self._lines:
            self._lines.stop()
        super().stop()

    def update(self, status=None, **options) -> None:  # type: ignore[override]
        """Change the line; a string is not markup."""
        super().update(styled(status) if isinstance(status, str) else status, **options)


class Description(ProgressColumn):
    """The description of a task, with control characters escaped."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Return the description of a task."""
        return styled(task.description)


class PlainProgress(Progress):
    """Progress bars on a terminal; elsewhere periodic lines with the other columns."""

    _lines: PlainLines | None = None

    def start(self) -> None:
        """Show the bars."""
        if self.console.is_terminal:
            super().start()
        elif not self.disable:
            self._lines = self._lines or PlainLines(self.console, self._line)

    def stop(self) -> None:
        """Stop showing the bars; without a terminal, print a last line."""
        if self.live.is_started:
            super().stop()
        elif self._lines:
            self._lines.stop()
            if not self.live.transient and any(task.visible for task in self.tasks):
                self.console.print(self._line(self._lines.seconds, self.tasks))

    def _line(self, seconds: float, tasks: Iterable[Task] | None = None) -> str:
        unfinished = [task for task in self.tasks if not task.finished] if tasks is None else tasks
        visible_tasks = [task for task in unfinished if task.visible]
        texts = (
            " ".join(filter(None, (_column_text(column, task) for column in self.columns))) for task in visible_tasks
        )
        return f"{'; '.join(texts) or 'working'}, {_after(seconds)}"


def _after(seconds: float) -> str:
    return f"after {timedelta(seconds=int(seconds))}"


def _column_text(column: str | ProgressColumn, task: Task) -> str:
    """Return the text of a column in a line; empty for the bar and for the elapsed time, which ends the line."""
    if isinstance(column, str | TimeElapsedColumn):
        return ""
    text = column(task)
    if not isinstance(text, Text):
        return ""
    if isinstance(column, TimeRemainingColumn):
        return "" if task.time_remaining is None else f"{text.plain} left"
    return text.plain.strip()


output = PlainConsole()  # results
error_console = PlainConsole(stderr=True)  # errors, progress and notes


def progress(*columns: ProgressColumn, console: Console | None = None, transient: bool = True, **options) -> Progress:
    """Return progress bars with the description of each task and ``columns`` (default: bar, count and time)."""
    following = columns or (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return PlainProgress(Description(), *following, console=console or error_console, transient=transient, **options)


def track(items: Iterable[Item], description: str, *, shown: bool = True) -> Iterable[Item]:
    """Yield ``items``, which must have a length, and draw a progress bar on standard error."""
    with progress(disable=not shown) as bar:
        yield from bar.track(items, description=description)


def print_json(tree: Any) -> None:
    """Print one JSON object on one line of standard output, in ASCII.

    A number that is not finite becomes the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``. An object without ``schema`` has
    version 1.
    """
    versioned = {SCHEMA: 1, **tree} if isinstance(tree, Mapping) else tree
    sys.stdout.write(json.dumps(strict(versioned), allow_nan=False) + "\n")


def write(text: str) -> None:
    """Write text to standard output and flush it; on a terminal, escape control characters."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
