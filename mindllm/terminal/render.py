"""Rendering of results: lines and tables, one JSON object, and progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mindllm.results import Result
from mindllm.terminal.console import PlainConsole, error_console, output, print_json, progress
from mindllm.terminal.progress import Progress
from mindllm.terminal.text import visible

REMAINING = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
BYTES = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()  # for downloads
SHARE = BarColumn(), TimeRemainingColumn()  # for work whose count is not meaningful


def show(result: Result, as_json: bool, console: PlainConsole = output) -> None:
    """Print a result as text, or as JSON."""
    if as_json:
        print_json(result.to_dict())
        return
    for part in result.parts():
        console.print(part)


@contextmanager
def drawn(*columns: ProgressColumn, transient: bool = True) -> Iterator[Progress]:
    """Yield a callback that draws on standard error: a bar for counted work, a line for other work.

    A ``transient`` bar is removed at the end. ``columns`` follow the description (default: bar, count and time).
    """
    with progress(*columns, console=error_console, transient=transient) as bar:
        task = bar.add_task("", total=None, visible=False)

        def report(what: str, done: int = 0, total: int | None = None) -> None:
            if total is None:
                bar.console.print(visible(what))
            else:
                bar.update(task, description=what, completed=done, total=total, visible=True)

        yield report


@contextmanager
def passing() -> Iterator[Progress]:
    """Yield a callback as :func:`drawn` for commands that log: a bar is removed as soon as its work is done."""
    bar = progress()

    def report(what: str, done: int = 0, total: int | None = None) -> None:
        nonlocal bar
        if total is None:
            error_console.print(visible(what))
        elif done < total:
            if not bar.tasks:
                bar.add_task("")
                bar.start()
            bar.update(bar.task_ids[0], description=what, completed=done, total=total)
        elif bar.tasks:
            bar.stop()
            bar = progress()

    try:
        yield report
    finally:
        bar.stop()
