"""How far an evaluation is: a bar with the time that is left on a terminal, a line a minute in the log of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from mindllm.terminal.console import error_console, progress

Watch = Callable[[str, int], Callable[[], None]]
NAMES = {"loglikelihood": "scoring", "generate_until": "writing"}
SECONDS_BETWEEN_LINES = 60.0
logger = logging.getLogger(__name__)


def unwatched(kind: str, count: int) -> Callable[[], None]:
    """Tells nobody how far the requests are."""
    return lambda: None


def logged(kind: str, count: int) -> Callable[[], None]:
    """Says in the log how many of ``count`` requests are answered and how long the others take, at most once a minute.

    Time counts from the first answer on, before which graphs are compiled.
    """
    first = said = math.inf
    answered = 0

    def answer() -> None:
        nonlocal first, said, answered
        answered += 1
        now = time.monotonic()
        if answered == 1:
            first = said = now
        if now - said < SECONDS_BETWEEN_LINES:
            return
        said = now
        left = timedelta(seconds=round((now - first) / (answered - 1) * (count - answered)))
        logger.info("%s: %d of %d answers, about %s left", NAMES.get(kind, kind), answered, count, left)

    return answer


@contextmanager
def watched(shown: bool) -> Iterator[Watch]:
    """A bar for each kind of request, or lines in the log of a run where there is no terminal; nothing where not ``shown``."""
    if not shown:
        yield unwatched
        return
    if not error_console.is_terminal and logger.isEnabledFor(logging.INFO):
        yield logged
        return
    with progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:

        def watch(kind: str, count: int) -> Callable[[], None]:
            task = bar.add_task(NAMES.get(kind, kind), total=count)
            return lambda: bar.advance(task)

        yield watch
