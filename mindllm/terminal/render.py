"""How commands show what the library returns: its lines and tables, one JSON object, and progress while it works."""

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
BYTES = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()  # where bytes are counted
SHARE = BarColumn(), TimeRemainingColumn()  # where how many says nothing to people


def show(result: Result, as_json: bool, console: PlainConsole = output) -> None:
    """Print a result for people, or for programs."""
    if as_json:
        print_json(result.to_dict())
        return
    for part in result.parts():
        console.print(part)


@contextmanager
def drawn(*columns: ProgressColumn, transient: bool = True) -> Iterator[Progress]:
    """Yield a callback that draws on standard error: a bar of what is counted, a line for what is not.

    A ``transient`` bar goes when it is done. ``columns`` come after what is done; by default how many of how many.
    """
    with progress(*columns, console=error_console, transient=transient) as bar:
        task = bar.add_task("", total=None, visible=False)

        def told(what: str, done: int = 0, total: int | None = None) -> None:
            if total is None:
                bar.console.print(visible(what))
            else:
                bar.update(task, description=what, completed=done, total=total, visible=True)

        yield told


@contextmanager
def passing() -> Iterator[Progress]:
    """Yield a callback as of :func:`drawn` for who logs: a bar goes as soon as all is done, so that the log has the terminal."""
    bar = progress()

    def told(what: str, done: int = 0, total: int | None = None) -> None:
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
        yield told
    finally:
        bar.stop()
