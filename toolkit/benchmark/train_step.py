"""Speed of a Llama's training step beside PyTorch: same sizes, weights, batches, dtype and threads, taking turns in one run.

Forward, backward, clipping by the global norm and AdamW in fp32. mindllm runs with graph-kernel fusion and without it,
PyTorch in eager mode and compiled. The ratio is formed of rounds that ran one after the other, so that noise of the machine
falls on both. The side ``torch_products`` does a step's products with weights and nothing else: its ratio is what no
implementation exceeds on that processor as long as its products are as fast as PyTorch's.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.terminal.console import error_console, output, track
from mindllm.terminal.tables import Table, texts
from mindllm.units import GIB, MIB
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import Side, spread
from toolkit.benchmark.workers.train_step import SIDES

EXAMPLES = """example:
  python -m toolkit.benchmark.train_step
  python -m toolkit.benchmark.train_step --model 8x512 --rounds 9 --markdown docs/benchmarks/train_step.md
  python -m toolkit.benchmark.train_step --model 4x256 --sides mindllm torch_eager --json train_step.json
"""
WORKER = "toolkit.benchmark.workers.train_step"
BASELINE = "torch_eager"
MODELS: dict[str, dict[str, int]] = {
    "4x256": {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 8, "intermediate": 688, "vocab": 1000},
    "8x512": {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "intermediate": 1376, "vocab": 1000},
}
SHAPES: dict[str, dict[str, int]] = {"4x256": {"seq": 256, "batch": 4}, "8x512": {"seq": 512, "batch": 4}}


@dataclass
class Measured:
    """What one side of one model showed. Times in seconds; a round's figure is the median of its steps."""

    name: str
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_step_s: float = 0.0
    start_s: float = 0.0
    second_start_s: float | None = None
    peak_mb: float = 0.0


def measure(sizes: Mapping[str, Any], names: Sequence[str], rounds: int) -> list[Measured]:
    """Starts every side, lets them take turns, and starts each a second time with the caches the first one left."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {**sizes, "directory": directory}
        results = {name: Measured(name) for name in names}
        with ExitStack() as stack:
            sides = [_start(stack, name, sizes, results[name]) for name in names]
            for _ in track(range(rounds), f"{sizes['model']}: rounds"):
                for side in sides:
                    answer = side.ask()
                    measured = results[side.name]
                    measured.step_s.append(statistics.median(answer["seconds"]))
                    measured.losses += answer["losses"]
                    measured.peak_mb = answer["peak_mb"]
        for name in names:
            with ExitStack() as stack:
                again = Measured(name)
                _start(stack, name, sizes, again)
                results[name].second_start_s = again.start_s
    return list(results.values())


def _start(stack: ExitStack, name: str, sizes: Mapping[str, Any], measured: Measured) -> Side:
    """Starts a side and runs its first steps: the time to the first one's end includes Python, imports, compiling."""
    with error_console.status(f"{sizes['model']}: {name} starts and compiles"):
        side = stack.enter_context(Side(WORKER, name, sizes, sizes["directory"]))
        answer = side.ask()
        elapsed = time.perf_counter() - side.started
    measured.first_step_s = answer["first_s"]
    measured.start_s = elapsed - (answer["all_s"] - answer["first_s"])
    measured.losses = answer["losses"]
    return side


def ratios(results: Sequence[Measured], name: str) -> list[float]:
    """Speed of a side over that of PyTorch eager, round by round; empty without the two."""
    found = {measured.name: measured for measured in results}
    if name not in found or BASELINE not in found:
        return []
    return [theirs / ours for ours, theirs in zip(found[name].step_s, found[BASELINE].step_s, strict=True)]


COLUMNS = (
    "side",
    "tokens/s",
    "ratio to PyTorch eager",
    "step ms",
    "start to first step s",
    "second start s",
    "peak memory GB",
    "last loss",
)


def rows(sizes: Mapping[str, Any], results: Sequence[Measured]) -> list[tuple[str, ...]]:
    """The table of one model: medians with the lowest and highest of the rounds."""
    tokens = sizes["batch"] * sizes["seq"]
    lines: list[tuple[str, ...]] = []
    for measured in results:
        ratio = ratios(results, measured.name)
        lines.append(
            (
                measured.name,
                spread([tokens / seconds for seconds in measured.step_s], 0),
                spread(ratio, 2) if ratio else "",
                f"{statistics.median(measured.step_s) * 1e3:.0f}",
                f"{measured.start_s:.1f}",
                f"{measured.second_start_s:.1f}",
                f"{measured.peak_mb * MIB / GIB:,.3f}",
                f"{measured.losses[-1]:.5f}" if measured.losses else "",
            )
        )
    return lines


def title(sizes: Mapping[str, Any]) -> str:
    """Sizes of a model in a line."""
    return (
        f"{sizes['layers']} layers x {sizes['hidden']}, {sizes['heads']} heads, feed-forward {sizes['intermediate']}, "
        f"vocabulary {sizes['vocab']}, batch {sizes['batch']} x {sizes['seq']} tokens, fp32, {sizes['threads']} threads"
    )


def show(sizes: Mapping[str, Any], results: Sequence[Measured]) -> None:
    """Prints the table of one model."""
    output.print(Table(title(sizes), texts(*COLUMNS), rows(sizes, results)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every model and prints its table."""
    parser = CommandParser(prog="python -m toolkit.benchmark.train_step", description=__doc__, epilog=EXAMPLES)
    parser.add_argument(
        "--model",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help="layers x hidden, of {} (default: all)".format(", ".join(MODELS)),
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        default=list(SIDES),
        help="what to compare, of {} (default: all)".format(", ".join(SIDES)),
        metavar="SIDE",
    )
    parser.add_argument("--seq", type=int, help="tokens of a sequence (default: 256 for 4x256, 512 for 8x512)")
    parser.add_argument("--batch", type=int, help="sequences of a batch (default: 4)")
    parser.add_argument("--kv_heads", type=int, help="key and value heads (default: all)")
    parser.add_argument("--vocab", type=int, help="vocabulary (default: 1000)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all, %(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all rounds to FILE")
    parser.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the tables, with this command, to FILE"
    )
    options = parser.parse_args(arguments)
    if min(options.steps, options.rounds, options.threads) < 1:
        raise UserError("--steps, --rounds and --threads must be at least 1")
    if not any(name.startswith("mindllm") for name in options.sides):
        raise UserError("--sides: name mindllm or mindllm_unfused as well, the others start from its weights")
    options.sides.sort(key=list(SIDES).index)
    reports, tables = [], []
    for model in options.model:
        given = {key: getattr(options, key) for key in ("seq", "batch", "kv_heads", "vocab") if getattr(options, key)}
        fixed = {"model": model, "steps": options.steps, "threads": options.threads}
        sizes = {**MODELS[model], **SHAPES[model], **given, **fixed}
        results = measure(sizes, options.sides, options.rounds)
        show(sizes, results)
        tables.append((title(sizes), COLUMNS, rows(sizes, results)))
        sides = [{**vars(measured), "ratio": ratios(results, measured.name)} for measured in results]
        reports.append({**sizes, "sides": sides})
    if options.json is not None:
        with atomic_open(options.json) as file:
            json.dump(reports, file, indent=2)
    if options.markdown is not None:
        command = ["python", "-m", "toolkit.benchmark.train_step", *(arguments or sys.argv[1:])]
        write_markdown(options.markdown, "Training step beside PyTorch", __doc__ or "", shlex.join(command), tables)
    return 0


if __name__ == "__main__":
    run_command(main)
