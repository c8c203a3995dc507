"""What an evaluation says: the harness's table, one JSON object, the questions with their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval.utils import make_table

from mindllm.evaluate.run import Outcome
from mindllm.files import atomic_open
from mindllm.terminal.json_text import strict

RESULTS, PAGE = "results.json", "wrong_answers.html"


def table(outcome: Outcome) -> str:
    """The tables as ``lm_eval`` prints them: of the tasks, and of their groups if there are some."""
    tables = [make_table(outcome.results, name) for name in ("results", "groups") if outcome.results[name]]
    return "\n".join(tables).rstrip()


def as_json(outcome: Outcome, model: str) -> dict[str, Any]:
    """Everything but the questions, in types that JSON has; a figure that is not finite is its name."""
    parts = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples")
    return {
        "model": model,
        "tasks": outcome.scores(),
        **{name: _plain(outcome.results[name]) for name in parts},
        "failures": dict(outcome.failures),
    }


def write_results(outcome: Outcome, model: str, directory: Path, samples: bool) -> None:
    """Writes ``results.json``, and with ``samples`` one file of JSON Lines for each task."""
    with atomic_open(directory / RESULTS) as file:
        file.write(json.dumps(as_json(outcome, model), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    for task, questions in outcome.samples.items() if samples else ():
        with atomic_open(directory / f"samples_{task}.jsonl") as file:
            for question in questions:
                file.write(json.dumps(_plain(question), ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    plain = strict(value)
    return plain if plain is None or isinstance(plain, str | int | float) else str(plain)
