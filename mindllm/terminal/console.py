"""The terminal: the only place where rich is told to print. Text is text, never markup; control characters are shown, not obeyed.

Names, paths, values and messages come from users, files and other programs. Printed as markup ``runs[lr=3e-4]`` loses its end,
``run.yaml:100:`` becomes a picture, ``[/x]`` is an error, and an escape sequence moves the cursor. Styles are given as
:func:`mindllm.terminal.text.styled` text instead.
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
SECONDS_BETWEEN_LINES = 30.0  # of progress, where standard error is no terminal


class PlainConsole(Console):
    """A console that prints strings as they are and leaves it to the terminal to wrap lines.

    ``table_width`` is what tables keep to: the width of the terminal (or ``COLUMNS``), and none where nobody looks at one.
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
        """Nobody reads any more: of the output that ends a command, of errors it does not."""
        self.quiet = True
        if not self.stderr:
            raise BrokenPipeError

    @property
    def table_width(self) -> int | None:
        """Columns a table may take; None: as many as it likes."""
        return self.width if self.has_width or self.is_terminal or "COLUMNS" in os.environ else None

    def render_str(self, text: str, **options) -> Text:  # type: ignore[override]
        """All strings that are printed, also as cells and titles, go through here."""
        options |= {"emoji": False, "markup": False, "highlight": False}
        return super().render_str(visible(text), **options)

    def status(self, status, **options) -> Status:  # type: ignore[override]
        """A line that says what is being done; of a string nothing is markup."""
        return PlainStatus(styled(status) if isinstance(status, str) else status, console=self, **options)


class PlainLines:
    """Prints a line every so many seconds while something long goes on: how progress is told where there is no terminal."""

    def __init__(self, console: Console, line: Callable[[float], str]) -> None:
        self.console, self.line = console, line
        self._ended = threading.Event()
        self._began = time.monotonic()
        if not console.is_terminal:
            threading.Thread(target=self._run, args=(SECONDS_BETWEEN_LINES,), name="progress", daemon=True).start()

    def stop(self) -> None:
        """Print no more lines."""
        self._ended.set()

    def _run(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            self.console.print(self.line(self.seconds))

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began


class PlainStatus(Status):
    """A line that says what is being done."""

    _lines: PlainLines | None = None

    def start(self) -> None:
        """Begin to say it."""
        if self.console.is_terminal:
            super().start()
        self._lines = self._lines or PlainLines(self.console, lambda seconds: f"{self.status}, {_after(seconds)}")

    def stop(self) -> None:
        """Say it no longer."""
        if self._lines:
            self._lines.stop()
        super().stop()

    def update(self, status=None, **options) -> None:  # type: ignore[override]
        """Says something else; of a string nothing is markup."""
        super().update(styled(status) if isinstance(status, str) else status, **options)


class Description(ProgressColumn):
    """What a task is called, as it is: no markup, and control characters shown."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Return the description of a task."""
        return styled(task.description)


class PlainProgress(Progress):
    """Bars on a terminal; elsewhere a line now and then with what the columns beside the bar say."""

    _lines: PlainLines | None = None

    def start(self) -> None:
        """Begin to show it."""
        if self.console.is_terminal:
            super().start()
        elif not self.disable:
            self._lines = self._lines or PlainLines(self.console, self._line)

    def stop(self) -> None:
        """Show it no longer; what stays on a terminal is a last line."""
        if self.live.is_started:
            super().stop()
        elif self._lines:
            self._lines.stop()
            if not self.live.transient and any(task.visible for task in self.tasks):
                self.console.print(self._line(self._lines.seconds, self.tasks))

    def _line(self, seconds: float, tasks: Iterable[Task] | None = None) -> str:
        wanted = [task for task in self.tasks if not task.finished] if tasks is None else tasks
        shown = [task for task in wanted if task.visible]
        said = "; ".join(" ".join(filter(None, (_said(column, task) for column in self.columns))) for task in shown)
        return f"{said or 'working'}, {_after(seconds)}"


def _after(seconds: float) -> str:
    return f"after {timedelta(seconds=int(seconds))}"


def _said(column: str | ProgressColumn, task: Task) -> str:
    """What a column of a bar says in a line; the bar itself nothing, and the time is said of all."""
    if isinstance(column, str | TimeElapsedColumn):
        return ""
    said = column(task)
    if not isinstance(said, Text):
        return ""
    if isinstance(column, TimeRemainingColumn):
        return "" if task.time_remaining is None else f"{said.plain} left"
    return said.plain.strip()


output = PlainConsole()  # what was asked for
error_console = PlainConsole(stderr=True)  # errors, progress, and everything about the answer


def progress(*columns: ProgressColumn, console: Console | None = None, transient: bool = True, **options) -> Progress:
    """A bar after each task's description, which is not markup; ``columns`` come after it (default: how many of how many)."""
    following = columns or (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return PlainProgress(Description(), *following, console=console or error_console, transient=transient, **options)


def track(items: Iterable[Item], description: str, *, shown: bool = True) -> Iterable[Item]:
    """Yields ``items`` while a bar on standard error says how far it has come; ``items`` must have a length."""
    with progress(disable=not shown) as bar:
        yield from bar.track(items, description=description)


def print_json(tree: Any) -> None:
    """One JSON object on one line of standard output, in ASCII: whatever is in its strings is escaped.

    A number that JSON does not know is a string, ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``. Keys that tell no version of
    themselves, under ``schema``, are the first.
    """
    versioned = {SCHEMA: 1, **tree} if isinstance(tree, Mapping) else tree
    sys.stdout.write(json.dumps(strict(versioned), allow_nan=False) + "\n")


def write(text: str) -> None:
    """Write what grows to standard output, at once; a terminal is shown control characters instead of obeying them."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
