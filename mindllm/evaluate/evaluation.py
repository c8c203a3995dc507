"""A whole evaluation: the model, its tasks, the files, and the error that names tasks that failed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.errors import RunFailed
from mindllm.evaluate.load import evaluated_model
from mindllm.evaluate.local_data import OFFLINE
from mindllm.files import atomic_open
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.job.ranks import SINGLE_RANK, Ranks

if TYPE_CHECKING:
    from mindllm.evaluate.run import Outcome


def evaluate_on_tasks(
    config: RunConfig,
    tasks: Sequence[str],
    directory: Path,
    ranks: Ranks = SINGLE_RANK,
    progress: Progress = unwatched,
) -> Outcome:
    """Evaluates the weights of ``load_checkpoint`` on ``tasks``, with results in ``directory``; the device is selected.

    Of several processes each answers its share of the requests, and the first one writes and tells ``progress``.

    Raises:
        UserError: a task is unknown, or the model cannot be loaded.
    """
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    from mindllm.evaluate.report import PAGE, render_page, write_results
    from mindllm.evaluate.run import evaluate_tasks, find_tasks

    manager = find_tasks(tasks, config.evaluation)
    model = evaluated_model(config, directory, ranks, progress if ranks.is_first else unwatched)
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
    return RunFailed("\n".join(failure_lines(failures)))


def failure_lines(failures: dict[str, str]) -> list[str]:
    """Return a line for every task that failed, with the reason."""
    return [f"task {name} failed: {why}" for name, why in failures.items()]
