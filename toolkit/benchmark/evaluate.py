"""Speed of an evaluation beside lm-evaluation-harness's own class for Hugging Face models: same weights, questions and threads.

Both sides answer the same questions after the same solved examples, taking turns in one run; questions are about Python's
standard library, in the formats of MMLU, ARC and GSM8K. The first round of a side, with compilation, is told apart; the others
give the median and the spread. The ratio is formed of rounds that ran one after the other, so that noise of the machine falls
on both; that of processor time is what is left of it on a machine that others use, too. Scores of both sides have to be equal.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import is_hugging_face, read_model_config
from mindllm.errors import RunFailed, UserError
from mindllm.files import atomic_open
from mindllm.terminal.console import error_console, output, track
from mindllm.terminal.tables import Table, texts
from toolkit.benchmark.evaluate_data import TASKS, write_questions
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import Side, spread
from toolkit.benchmark.workers.evaluate import SIDES

EXAMPLES = """example:
  mindllm weights export output/llama2_tiny/checkpoint/llm-400 output/llama2_tiny_hf
  python -m toolkit.benchmark.evaluate --model output/llama2_tiny_hf --markdown docs/benchmarks/evaluation.md
"""
WORKER = "toolkit.benchmark.workers.evaluate"
COLUMNS = ("task", "mindllm s", "hf s", "times as fast", "hf's processor time to ours", "first round s", "score")


def measure(sizes: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Runs ``rounds`` rounds of each side in turns after a first one; returns seconds and their ratio per round.

    Raises:
        RunFailed: the sides do not find the same scores.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = [stack.enter_context(Side(WORKER, name, sizes, directory)) for name in SIDES]
        for _ in track(range(rounds + 1), sizes["task"]):
            for side in sides:
                answers[side.name].append(side.ask())
    scores = {name: found[0]["scores"] for name, found in answers.items()}
    if scores["mindllm"] != scores["hf"]:
        raise RunFailed(f"{sizes['task']}: the sides find different scores: {scores}")
    seconds = {name: [answer["seconds"] for answer in found[1:]] for name, found in answers.items()}
    rounds_of_both = list(zip(answers["mindllm"], answers["hf"], strict=True))[1:]
    ratios = {
        name: [theirs[unit] / ours[unit] for ours, theirs in rounds_of_both]
        for name, unit in (("ratio", "seconds"), ("processor_ratio", "processor"))
    }
    first = {f"{name}_first_s": found[0]["seconds"] for name, found in answers.items()}
    return {**sizes, **seconds, **ratios, **first, "scores": scores["hf"]}


def row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """The line of one task: medians with the lowest and highest of the rounds."""
    spreads = [spread(result[name], 2) for name in ("mindllm", "hf", "ratio", "processor_ratio")]
    first = f"{result['mindllm_first_s']:.1f} / {result['hf_first_s']:.1f}"
    score = ", ".join(f"{name} {value:.3f}" for name, value in result["scores"].items())
    return (f"{result['task']}: {TASKS[result['task']]}", *spreads, first, score)


def title(sizes: Mapping[str, Any]) -> str:
    """The model and the work in a line."""
    model = read_model_config(Path(sizes["model"]))
    return (
        f"{sizes['questions']} questions after {sizes['shots']} examples; {model.num_layers} layers x {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {sizes['max_length']} tokens, batch {sizes['batch']}, "
        f"{sizes['new']} tokens to write, fp32, {sizes['threads']} threads"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every task and prints the table."""
    parser = CommandParser(prog="python -m toolkit.benchmark.evaluate", description=__doc__, epilog=EXAMPLES)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face directory (mindllm weights export)")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks (default: all)")
    add("--questions", type=int, default=200, help="questions of each task (default: %(default)s)")
    add("--shots", type=int, default=5, help="solved examples before a question (default: %(default)s)")
    add("--new", type=int, default=32, help="tokens to write where the answer is written (default: %(default)s)")
    add("--batch", type=int, default=8, help="texts at once, of both sides (default: %(default)s)")
    add("--rounds", type=int, default=3, help="rounds of each side (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all, %(default)s)")
    add("--json", type=output_file, metavar="FILE", help="write all rounds to FILE")
    add("--markdown", type=output_file, metavar="FILE", help="write the table, with this command, to FILE")
    options = vars(parser.parse_args(arguments))
    tasks, rounds, file, page, model = (options.pop(name) for name in ("tasks", "rounds", "json", "markdown", "model"))
    if min(rounds, *options.values()) < 1:
        raise UserError("--questions, --shots, --new, --batch, --rounds and --threads must be at least 1")
    if not is_hugging_face(model):
        raise UserError(f"{model}: no Hugging Face directory; mindllm weights export makes one of a checkpoint")
    sizes = {**options, "model": str(model.resolve()), "max_length": read_model_config(model).seq_length}
    with tempfile.TemporaryDirectory() as data:
        write_questions(Path(data), options["questions"])
        results = [measure({**sizes, "task": task, "data": data}, rounds) for task in tasks]
    output.print(Table(title(sizes), texts(*COLUMNS), map(row, results)))
    if file is not None:
        with atomic_open(file) as handle:
            json.dump(results, handle, indent=2)
    if page is not None:
        command = shlex.join(["python", "-m", "toolkit.benchmark.evaluate", *(arguments or sys.argv[1:])])
        tables = [(title(sizes), COLUMNS, [row(result) for result in results])]
        write_markdown(page, "Evaluation beside lm-evaluation-harness's hf", __doc__ or "", command, tables)
        error_console.print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    run_command(main)
