"""A whole evaluation: the model, its tasks with a bar on the terminal, the files, the exit code's reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from mindllm.config import RunConfig
from mindllm.console import error_console, progress
from mindllm.errors import RunFailed
from mindllm.evaluate.load import evaluated_model
from mindllm.evaluate.local_data import OFFLINE
from mindllm.evaluate.model import Watch, unwatched
from mindllm.files import atomic_open
from mindllm.train.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from mindllm.evaluate.run import Outcome

NAMES = {"loglikelihood": "scoring", "generate_until": "writing"}


def evaluate_on_tasks(config: RunConfig, tasks: Sequence[str], directory: Path, ranks: Ranks = ALONE) -> Outcome:
    """Evaluates the weights of ``load_checkpoint`` on ``tasks``, with results in ``directory``; the device is selected.

    Of several processes each answers its share of the requests, and the first one writes.

    Raises:
        UserError: a task is unknown, or the model cannot be loaded.
    """
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    from mindllm.evaluate.page import render_page
    from mindllm.evaluate.report import PAGE, write_results
    from mindllm.evaluate.run import evaluate_tasks, find_tasks

    manager = find_tasks(tasks, config.evaluation)
    with bars(ranks.is_first) as watch:
        model = evaluated_model(config, directory, ranks, watch)
        try:
            outcome = evaluate_tasks(model, tasks, config.evaluation, manager)
        finally:
            model.answers.close()
    if ranks.is_first:
        write_results(outcome, config.load_checkpoint, directory, config.evaluation.log_samples)
        with atomic_open(directory / PAGE) as file:
            file.write(render_page(outcome, config.load_checkpoint))
    return outcome


def failure_of(failures: dict[str, str]) -> RunFailed:
    """The error that names every task that failed."""
    lines = [f"task {name} failed: {why}" for name, why in failures.items()]
    return RunFailed("\n".join(lines))


@contextmanager
def bars(shown: bool) -> Iterator[Watch]:
    """A bar for each kind of request of a task, with the time that is left."""
    if not shown:
        yield unwatched
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with progress(*columns, disable=not error_console.is_terminal) as bar:

        def watch(kind: str, count: int) -> Callable[[], None]:
            task = bar.add_task(NAMES.get(kind, kind), total=count)
            return lambda: bar.advance(task)

        yield watch
