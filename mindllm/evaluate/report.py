"""What an evaluation says: the harness's table, one JSON object, the questions with their answers.

Its page of wrong answers says what was asked, what would have been right, and what the model said; one file that needs no
network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lm_eval.utils import make_table

from mindllm.evaluate.run import Outcome
from mindllm.files import atomic_open
from mindllm.terminal.json_text import strict
from mindllm.terminal.page import fill, mark

RESULTS, PAGE = "results.json", "wrong_answers.html"
TEMPLATE = Path(__file__).with_name("page.html")
MOST = 200  # wrong answers of a task that are shown
DECIDING = ("exact_match", "acc", "pass@1", "pass_at_1", "em", "acc_norm")
Sample = Mapping[str, Any]


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


def render_page(outcome: Outcome, model: str) -> str:
    """Returns the page as HTML; of a task without right and wrong answers, such as a perplexity, nothing is shown."""
    parts = [part for task, samples in outcome.samples.items() for part in _task(task, samples)]
    parts += [f"<h2>{escape(task)} failed</h2><p>{escape(why)}</p>" for task, why in outcome.failures.items()]
    markup = {"mark": mark("evaluation"), "body": "\n".join(parts)}
    return fill(TEMPLATE, {"title": f"Wrong answers of {model}"}, markup)


def is_wrong(sample: Sample) -> bool | None:
    """Whether an answer is wrong; None where its metrics do not say."""
    metric = next((name for name in DECIDING if name in sample.get("metrics", ())), None)
    value = sample.get(metric) if metric else None
    return None if not isinstance(value, int | float) else value == 0


def _task(task: str, samples: Sequence[Sample]) -> Iterator[str]:
    by_filter: dict[str, list[Sample]] = {}
    for sample in samples:
        by_filter.setdefault(str(sample.get("filter", "none")), []).append(sample)
    for name, several in by_filter.items():
        judged = [sample for sample in several if is_wrong(sample) is not None]
        if not judged:
            continue
        wrong = [sample for sample in judged if is_wrong(sample)]
        heading = task if name == "none" else f"{task}, {name}"
        shown = f"; the first {MOST} are shown" if len(wrong) > MOST else ""
        yield f"<h2>{escape(heading)}</h2><p>{len(wrong)} of {len(judged)} answers are wrong{shown}</p>"
        yield from map(_question, wrong[:MOST])


def _question(sample: Sample) -> str:
    arguments = sample["arguments"]
    asked = str(arguments[0][0])
    lines = _choices(sample) if len(arguments) > 1 else _written(sample)
    question = asked.strip().split("\n\n")[-1]  # what stands before are examples
    summary = escape(" ".join(question.split())[-110:])
    return (
        f"<details><summary><b>{escape(str(sample['doc_id']))}</b> …{summary}</summary>"
        f"<pre>{escape(asked)}</pre><table>{''.join(lines)}</table></details>"
    )


def _choices(sample: Sample) -> Iterator[str]:
    """A row for each choice: its log-likelihood, and which one was right and which one was said."""
    scores = [float(answer[0]) for answer in sample["filtered_resps"]]
    said = scores.index(max(scores))
    target = sample["target"]
    targets = target if isinstance(target, list | tuple) else [target]  # places of choices, or their texts
    texts = [item.strip() for item in targets if isinstance(item, str)]
    for place, (arguments, score) in enumerate(zip(sample["arguments"], scores, strict=True)):
        right = place in targets or str(arguments[1]).strip() in texts
        notes = [note for note, holds in (("right", right), ("said", place == said)) if holds]
        style = "right" if right else "said" if place == said else ""
        cells = (escape(str(arguments[1])), f"{score:.3f}", " ".join(notes))
        yield f'<tr class="{style}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _written(sample: Sample) -> Iterator[str]:
    """What was to be written, what was, and what the task took of it."""
    response = sample["resps"][0][0] if sample["resps"] and sample["resps"][0] else ""
    taken = sample["filtered_resps"][0] if sample["filtered_resps"] else ""
    for name, value, style in (
        ("right", sample["target"], "right"),
        ("written", response, "said"),
        ("taken", taken, "said"),
    ):
        yield f'<tr class="{style}"><td>{name}</td><td><pre>{escape(str(value))}</pre></td></tr>'
