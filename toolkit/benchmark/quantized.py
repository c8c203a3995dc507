"""Projections in codes of 8 and 4 bits beside floats: speed and memory of generation, and of training adapters.

Generation decodes with the kernels in C++, training takes adapters of rank 8 beside all projections. Every kind is a process
of its own; memory is that of the process, MindSpore's own (about 400 MB) included. Embeddings and head stay in fp32.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.terminal.console import output, track
from mindllm.terminal.tables import Table, texts
from mindllm.units import GIB, MIB
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import Side, spread
from toolkit.benchmark.workers.quantized import HEAD_DIM, KINDS

EXAMPLES = """example:
  python -m toolkit.benchmark.quantized
  python -m toolkit.benchmark.quantized --hidden 2048 --intermediate 5504 --work write --markdown docs/benchmarks/quantized.md
"""
WORKER = "toolkit.benchmark.workers.quantized"
COLUMNS = ("projections", "tokens/s", "memory GB", "peak GB")
WORK = {"write": "generation", "train": "training of adapters"}


def measure(work: str, kind: str, sizes: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Speeds of ``rounds`` rounds after a first one, which compiles, and memory after the last."""
    with tempfile.TemporaryDirectory() as directory, Side(WORKER, f"{work} {kind}", sizes, directory) as side:
        answers = [side.ask() for _ in track(range(rounds + 1), f"{work} {kind}")]
    speeds = [answer["tokens"] / answer["seconds"] for answer in answers[1:]]
    return {
        **sizes,
        "work": work,
        "kind": kind,
        "speeds": speeds,
        "mb": answers[-1]["mb"],
        "peak_mb": answers[-1]["peak_mb"],
    }


def row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """The line of one kind."""
    sizes = (f"{size * MIB / GIB:,.3f}" for size in (result["mb"], result["peak_mb"]))
    return (result["kind"], spread(result["speeds"], 1), *sizes)


def title(work: str, sizes: Mapping[str, Any]) -> str:
    """Work and sizes in a line."""
    return (
        f"{WORK[work]}: {sizes['layers']} layers x {sizes['hidden']}, feed-forward {sizes['intermediate']}, vocabulary "
        f"{sizes['vocab']}, batch {sizes['batch']} x {sizes['length']} tokens, groups of {sizes['group']}, "
        f"{sizes['threads']} threads"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every kind and prints the tables."""
    parser = CommandParser(prog="python -m toolkit.benchmark.quantized", description=__doc__, epilog=EXAMPLES)
    for name, value, words in (
        ("hidden", 1024, f"hidden size, heads of {HEAD_DIM}"),
        ("layers", 8, "decoder layers"),
        ("intermediate", 2816, "feed-forward width"),
        ("vocab", 4096, "vocabulary"),
        ("length", 128, "tokens of a sequence"),
        ("batch", 1, "sequences"),
        ("group", 128, "columns that share a scale"),
        ("rounds", 3, "rounds of each kind"),
        ("threads", os.cpu_count() or 1, "threads"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{words} (default: %(default)s)")
    parser.add_argument(
        "--work", nargs="+", choices=tuple(WORK), default=list(WORK), help="what is measured (default: all)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="projections (default: all)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all rounds to FILE")
    parser.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the tables, with this command, to FILE"
    )
    sizes = vars(parser.parse_args(arguments))
    works, kinds, rounds, file, page = (sizes.pop(name) for name in ("work", "kinds", "rounds", "json", "markdown"))
    if min(rounds, *sizes.values()) < 1 or sizes["hidden"] % HEAD_DIM or sizes["length"] <= 16:
        raise UserError(f"sizes must be at least 1, --hidden a multiple of {HEAD_DIM}, --length above 16")
    found = {work: [measure(work, kind, sizes, rounds) for kind in kinds] for work in works}
    tables = [(title(work, sizes), COLUMNS, [row(result) for result in results]) for work, results in found.items()]
    for name, columns, rows in tables:
        output.print(Table(name, texts(*columns), iter(rows)))
    if file is not None:
        with atomic_open(file) as handle:
            json.dump(found, handle, indent=2)
    if page is not None:
        command = shlex.join(["python", "-m", "toolkit.benchmark.quantized", *(arguments or sys.argv[1:])])
        write_markdown(page, "Projections in codes", __doc__ or "", command, tables)
    return 0


if __name__ == "__main__":
    run_command(main)
