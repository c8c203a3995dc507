"""``mindllm finetune DIR DATA --method lora`` beside the same run by PEFT: equal data, batches, rank and rates, both on the CPU.

What is chosen is chosen by mindllm; PEFT is given the YAML that it wrote. The matrices A are drawn by each side for itself.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, run_command
from mindllm.errors import RunFailed
from mindllm.outside import parse_json
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, texts
from mindllm.train.metrics_file import METRICS_NAME, read_metrics
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import ROOT

EXAMPLES = """example:
  python -m toolkit.benchmark.finetune models/SmolLM2-135M-Instruct examples/python_questions.jsonl \\
      --markdown docs/benchmarks/finetune.md
"""
DESCRIPTION = """One command each, from its start to its end, one after the other. Losses are nats per token of an answer, means
of the first and the last ten steps; held out are rows that are not trained on. Seconds of a step are medians, without the first.
Peak memory is the most that the process held."""
COLUMNS = (
    "side",
    "steps",
    "first losses",
    "last losses",
    "held out before",
    "held out",
    "s to first step",
    "s per step",
    "processor s",
    "peak memory, GB",
)
POLL, EDGE = 0.2, 10
Found = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sides and print the table."""
    parser = CommandParser(prog="python -m toolkit.benchmark.finetune", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("model", type=Path, help="Hugging Face directory")
    parser.add_argument("data", type=Path, help="conversations")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="writes the table there, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mindllm_finetune_") as directory:
        run = Path(directory, "out")
        ours = _ours(options.model.resolve(), options.data.resolve(), run)
        theirs = _theirs(run / "finetune.yaml")
    rows = [_row("mindllm", ours), _row("transformers and PEFT", theirs)]
    output.print(Table("", texts(*COLUMNS), rows))
    if options.markdown:
        command = f"python -m toolkit.benchmark.finetune models/{options.model.resolve().name} {options.data}"
        write_markdown(options.markdown, "Fine-tuning", DESCRIPTION, command, [("LoRA", COLUMNS, rows)])
    return 0


def _ours(model: Path, data: Path, run: Path) -> Found:
    command = [
        sys.executable,
        "-m",
        "mindllm",
        "finetune",
        str(model),
        str(data),
        "--method",
        "lora",
        "--output",
        str(run),
    ]
    begun, first, before = time.perf_counter(), 0.0, resource.getrusage(resource.RUSAGE_CHILDREN)
    metrics = run / METRICS_NAME
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if not first and metrics.is_file() and metrics.stat().st_size:
                first = time.perf_counter() - begun
            time.sleep(POLL)
    if process.returncode:
        raise RunFailed(f"mindllm finetune ended with {process.returncode}")
    used, records = resource.getrusage(resource.RUSAGE_CHILDREN), read_metrics(metrics)
    held_out = [parse_json(line)["loss"] for line in (run / "evaluation.jsonl").read_bytes().splitlines()]
    return {
        "first_step": first,
        "losses": [record["loss"] for record in records],
        "seconds": [record["step_time_s"] for record in records],
        "held_out_before": held_out[0],
        "held_out": held_out[-1],
        "peak_bytes": used.ru_maxrss << 10,
        "processor_seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
    }


def _theirs(yaml: Path) -> Found:
    command = [sys.executable, "-m", "toolkit.benchmark.workers.finetune", str(yaml)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"the side of PEFT failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _row(name: str, found: Found) -> list[str]:
    losses, seconds = found["losses"], found["seconds"]
    return [
        name,
        str(len(losses)),
        f"{statistics.mean(losses[:EDGE]):.3f}",
        f"{statistics.mean(losses[-EDGE:]):.3f}",
        f"{found['held_out_before']:.3f}",
        f"{found['held_out']:.3f}",
        f"{found['first_step']:,.0f}",
        f"{statistics.median(seconds[1:]):.2f}",
        f"{found['processor_seconds']:,.0f}",
        f"{found['peak_bytes'] / 1e9:.2f}",
    ]


if __name__ == "__main__":
    run_command(main)
