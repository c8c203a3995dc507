"""One model taken all the way by the command line: asked, tuned, merged, rounded to codes, and read by transformers and PEFT.

Every step is a command as a person types it, timed from outside. What transformers and PEFT say of the files stands beside it.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mindllm.command import CommandParser, output_directory, run_command
from mindllm.errors import RunFailed
from mindllm.outside import parse_json
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.tables import Table, texts
from mindllm.train.metrics_file import METRICS_NAME, read_metrics
from toolkit.benchmark.evaluate_data import write_questions
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import ROOT

EXAMPLES = """example:
  python -m toolkit.benchmark.all_the_way --model models/smollm2 --work /tmp/way --markdown docs/benchmarks/all_the_way.md
"""
WORKER = "toolkit.benchmark.workers.all_the_way"
EDGE = 8  # steps
QUESTIONS, TASK = 40, "arc_easy"
COLUMNS = ("step", "command", "s", "processor s", "peak GB", "what came of it")
KIB_IN_GIB = 1 << 20  # the system counts in KiB
DESCRIPTION = """Seconds are those of the whole command, with imports and compilation; peak memory is that of the largest of its
processes. Rows of transformers and PEFT read the same files in processes of their own, in fp32, and say whether they agree."""


@dataclass(frozen=True)
class Step:
    """What one command took, and what came of it."""

    name: str
    command: str
    seconds: float
    processor_s: float
    peak_gb: float
    result: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the model through all steps; returns 0."""
    parser = CommandParser(prog="python -m toolkit.benchmark.all_the_way", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, help="directory of Hugging Face, with a chat template")
    parser.add_argument("--data", type=Path, default=ROOT / "examples/python_questions.jsonl", help="conversations")
    parser.add_argument("--work", type=output_directory, required=True, help="empty directory for what is written")
    parser.add_argument("--steps", type=int, default=24, help="of tuning at most (default: 24)")
    parser.add_argument("--prompt", default="What is a list in Python?")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="writes the table there, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    found: list[Step] = []
    for step in _steps(options.model.resolve(), options.data.resolve(), options.work, options.steps, options.prompt):
        error_console.print(f"{step.name}: {step.seconds:.1f} s, {step.result}")
        found.append(step)
    rows = [
        (
            step.name,
            f"`{step.command}`",
            f"{step.seconds:.1f}",
            f"{step.processor_s:.1f}",
            f"{step.peak_gb:,.3f}",
            step.result,
        )
        for step in found
    ]
    if options.markdown:
        command = f"python -m toolkit.benchmark.all_the_way --model {options.model.resolve().name} --work way"
        write_markdown(options.markdown, "One model, all the way", DESCRIPTION, command, [("The steps", COLUMNS, rows)])
    if options.json:
        print_json({"steps": [asdict(step) for step in found]})
    else:
        output.print(Table("", texts(*COLUMNS), rows))
    return 0


def _steps(model: Path, data: Path, work: Path, steps: int, prompt: str) -> Iterator[Step]:
    """Every step in turn; each needs what the ones before it have written."""
    work.mkdir(parents=True, exist_ok=True)
    few = ["--max_new_tokens", "24", "--do_sample=false"]
    asked = ["generate", str(model), "--prompt", prompt, *few]
    first = _answer(work, "ask, the first time", asked)
    yield first
    yield _answer(work, "ask again", asked)
    yield _theirs(work, "the same by transformers", "generate", model, prompt, same_as=first.result)
    tuned_by = _told(
        work,
        f"tune an adapter, {steps} steps",
        ["finetune", str(model), str(data), "--output", "tuned", f"--runner_config.train_steps={steps}"],
    )
    yield replace(tuned_by, result=_losses(work / "tuned"))
    newest = sorted((work / "tuned/checkpoint").glob("llm-*"), key=lambda path: int(path.name.split("-")[1]))[-1]
    checkpoint = str(newest.relative_to(work))
    yield _told(work, "as PEFT reads it", ["weights", "adapter", checkpoint, "adapter"])
    yield _told(work, "merge", ["weights", "merge", checkpoint, "merged", "--base", str(model)])
    write_questions(work / "sets", QUESTIONS)
    evaluated = ["evaluate", "merged", "--tasks", TASK, "--data", "sets", "--json"]
    yield _told(work, f"evaluate on {QUESTIONS} questions", evaluated, _scores)
    tuned = _answer(work, "ask the tuned model", ["generate", "tuned", "--prompt", prompt, *few])
    yield tuned
    yield _theirs(work, "the merged one by transformers", "generate", Path("merged"), prompt, same_as=tuned.result)
    yield _theirs(work, "PEFT beside the merged one", "logits", model, prompt)
    yield _told(work, "8 bits", ["quantize", "merged", "int8", "--bits", "8", "--group", "64"])
    yield _answer(work, "ask in 8 bits", ["generate", "int8", "--prompt", prompt, *few])


def _told(work: Path, name: str, arguments: list[str], say: Callable[[str], str] = lambda out: "done") -> Step:
    """One command of ours."""
    seconds, used, peak, out = _run(work, [sys.executable, "-m", "mindllm", *arguments])
    shown = shlex.join(Path(word).name if Path(word).is_absolute() else word for word in arguments)
    return Step(name, f"mindllm {shown}", seconds, used, peak, say(out))


def _answer(work: Path, name: str, arguments: list[str]) -> Step:
    """A question; what comes of it is the answer."""
    return _told(work, name, arguments, lambda out: " ".join(out.split()))


def _theirs(work: Path, name: str, what: str, model: Path, prompt: str, same_as: str | None = None) -> Step:
    """What the libraries of Hugging Face say."""
    seconds, used, peak, out = _run(work, [sys.executable, "-m", WORKER, what, str(model), prompt])
    said = " ".join(out.split())
    if same_as is not None:
        said = "the same text" if said == same_as else f"another text: {said}"
    return Step(name, "transformers" if what == "generate" else "peft", seconds, used, peak, said)


def _losses(run: Path) -> str:
    """What tuning has made of the loss: means of the first and of the last steps."""
    losses = [record["loss"] for record in read_metrics(run / METRICS_NAME)]
    first, last = statistics.mean(losses[:EDGE]), statistics.mean(losses[-EDGE:])
    return f"loss {first:.2f} to {last:.2f} nats a token, means of {EDGE} steps"


def _scores(out: str) -> str:
    """The score of each task."""
    results = parse_json(out)["results"]
    return ", ".join(f"{task}: {scores['acc,none']:.3f} right" for task, scores in results.items())


def _run(work: Path, command: list[str]) -> tuple[float, float, float, str]:
    """Seconds, processor seconds, and the peak of a command in GB, with its output.

    Raises:
        RunFailed: it failed.
    """
    script = (
        "import json, resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([done.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss, done.stdout, done.stderr]))\n"
    )
    environment = {"PYTHONPATH": str(ROOT)}
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, *command],
        capture_output=True,
        text=True,
        cwd=work,
        env={**os.environ, **environment},
        check=True,
    )
    seconds = time.perf_counter() - begun
    code, used, peak, out, error = json.loads(done.stdout)
    if code:
        raise RunFailed(f"{shlex.join(command)} ended with {code}:\n{error[-2000:]}")
    return seconds, used, peak / KIB_IN_GIB, out


if __name__ == "__main__":
    run_command(main)
