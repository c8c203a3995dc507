"""Scores on public tasks as a result, found in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig, override_config, render_config
from mindllm.jobs.process import run_child, run_yaml_in_child
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts

if TYPE_CHECKING:
    from mindllm.results import Part

RESULTS, EVALUATION = "results.json", "evaluation"


@dataclass(frozen=True, repr=False)
class Scores(Result):
    """Scores of a model on tasks of lm-evaluation-harness; ``values`` has what the harness says beside them."""

    values: Mapping[str, Any]

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Figures of merit by task, or group of tasks, and by metric."""
        return self.values["tasks"]

    def summary(self) -> str:
        """Return the tasks."""
        return ", ".join(self.scores)

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return dict(self.values)

    def parts(self) -> Iterator[Part]:
        """Yield a row for every task and metric."""
        rows = [
            (task, metric, f"{value:.4f}") for task, metrics in self.scores.items() for metric, value in metrics.items()
        ]
        yield Table(str(self.values["model"]), [*texts("task", "metric"), *figures("value")], rows)


def evaluate_run(config: RunConfig, tasks: Sequence[str]) -> Scores:
    """Evaluate the weights of a run's ``load_checkpoint`` on tasks; results go below its output directory.

    Raises:
        UserError: a task is unknown, or the model cannot be loaded.
        RunFailed: a task failed.
    """
    run = override_config(config, {"eval_tasks": list(tasks), "run_mode": "eval"})
    run_yaml_in_child(render_config(run), "eval")
    return _read(Path(config.output_dir) / EVALUATION)


def evaluate_model(model: Path, tasks: Sequence[str], output: Path, options: Mapping[str, Any]) -> Scores:
    """Evaluate a Hugging Face directory or a checkpoint on tasks, with options of ``mindllm evaluate``; raises likewise."""
    arguments = ["evaluate", "--model", str(model), "--tasks", ",".join(tasks), "--output", str(output)]
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value not in (None, False):
            arguments += [f"--{name}", str(value)]
    run_child(arguments)
    return _read(output)


def _read(directory: Path) -> Scores:
    return Scores(json.loads((directory / RESULTS).read_text(encoding="utf-8")))
