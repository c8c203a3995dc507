"""Speed of greedy generation beside Hugging Face transformers: same sizes, prompts and threads, taking turns in one run.

The first round of a side, with compilation, is told apart; the others give the median and the spread. The ratio is formed of
rounds that ran one after the other, so that noise of the machine falls on both.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.terminal.console import output, track
from mindllm.terminal.tables import Table, texts
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import Side, spread
from toolkit.benchmark.workers.generate import HEAD_DIM, SIDES

EXAMPLES = """example:
  python -m toolkit.benchmark.generate
  python -m toolkit.benchmark.generate --hidden 512 --layers 8 --batch 1 --rounds 9 --json generate.json
  python -m toolkit.benchmark.generate --markdown docs/benchmarks/generate.md
"""
WORKER = "toolkit.benchmark.workers.generate"
COLUMNS = ("batch", "mindllm tokens/s", "transformers tokens/s", "ratio", "first call s")


def measure(sizes: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Runs ``rounds`` rounds of each side in turns after a first one; returns speeds and their ratio per round."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = [stack.enter_context(Side(WORKER, name, sizes, directory)) for name in SIDES]
        for _ in track(range(rounds + 1), f"batch {sizes['batch']}"):
            for side in sides:
                answers[side.name].append(side.ask())
    speeds = {name: [answer["tokens"] / answer["seconds"] for answer in found[1:]] for name, found in answers.items()}
    ratios = [ours / theirs for ours, theirs in zip(speeds["mindllm"], speeds["transformers"], strict=True)]
    first = {f"{name}_first_s": found[0]["seconds"] for name, found in answers.items()}
    return {**sizes, **speeds, "ratio": ratios, **first}


def row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """The line of one batch size: medians with the lowest and highest of the rounds."""
    spreads = [spread(result[name], digits) for name, digits in (("mindllm", 0), ("transformers", 0), ("ratio", 2))]
    first = f"{result['mindllm_first_s']:.1f} / {result['transformers_first_s']:.1f}"
    return (str(result["batch"]), *spreads, first)


def title(sizes: Mapping[str, Any]) -> str:
    """Sizes of the model and of the work in a line."""
    heads = sizes["hidden"] // HEAD_DIM
    return (
        f"{sizes['layers']} layers x {sizes['hidden']}, {heads} heads, {sizes['kv_heads']} of keys, feed-forward "
        f"{sizes['intermediate']}, vocabulary {sizes['vocab']}, {sizes['new']} tokens after {sizes['prompt']}, fp32, "
        f"{sizes['threads']} threads"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every batch size and prints the table."""
    parser = CommandParser(prog="python -m toolkit.benchmark.generate", description=__doc__, epilog=EXAMPLES)
    parser.add_argument(
        "--hidden", type=int, default=256, help=f"hidden size, heads of {HEAD_DIM} (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: %(default)s)")
    parser.add_argument("--kv_heads", type=int, help="key and value heads (default: all)")
    parser.add_argument("--intermediate", type=int, default=688, help="feed-forward width (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=200, help="tokens to write (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all, %(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all rounds to FILE")
    parser.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the table, with this command, to FILE"
    )
    sizes = vars(parser.parse_args(arguments))
    batches, rounds, file, page = (sizes.pop(name) for name in ("batch", "rounds", "json", "markdown"))
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["hidden"] // HEAD_DIM
    if min(rounds, *batches, *sizes.values()) < 1 or sizes["hidden"] % HEAD_DIM:
        raise UserError(f"sizes, --rounds and --threads must be at least 1, and --hidden a multiple of {HEAD_DIM}")
    results = [measure({**sizes, "batch": batch}, rounds) for batch in batches]
    output.print(Table(title(sizes), texts(*COLUMNS), map(row, results)))
    if file is not None:
        with atomic_open(file) as handle:
            json.dump(results, handle, indent=2)
    if page is not None:
        command = shlex.join(["python", "-m", "toolkit.benchmark.generate", *(arguments or sys.argv[1:])])
        tables = [(title(sizes), COLUMNS, [row(result) for result in results])]
        write_markdown(page, "Generation beside transformers", __doc__ or "", command, tables)
    return 0


if __name__ == "__main__":
    run_command(main)
