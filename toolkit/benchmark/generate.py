"""Speed of greedy generation beside Hugging Face transformers: same sizes and threads, the two taking turns in one run.

Each side is a process of its own, so that their thread pools do not meet, and waits while the other one works. The first
round of a side, with compilation, is told apart; the others give the median and the spread.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from mindllm.command import CommandParser, run_command
from mindllm.errors import RunFailed
from mindllm.files import atomic_open
from toolkit.benchmark.generate_worker import HEAD_DIM, SIDES

EXAMPLES = """example:
  python -m toolkit.benchmark.generate
  python -m toolkit.benchmark.generate --hidden 512 --layers 8 --batch 1 --rounds 9 --json generate.json
"""
ROOT = Path(__file__).resolve().parents[2]


class Side:
    """A worker process; ``rounds`` holds the seconds of every round so far, the first one with compilation."""

    def __init__(self, name: str, sizes: dict[str, int], directory: str) -> None:
        self.name = name
        self.tokens = 0
        self.rounds: list[float] = []
        threads = str(sizes["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLOG_v": "3"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._errors = open(f"{directory}/{name}.log", "w+", encoding="utf-8")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.benchmark.generate_worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=directory,
            env=environment,
        )
        self._send(json.dumps(sizes))

    def run(self) -> None:
        """One round. Raises RunFailed with what the worker wrote when it ends instead of answering."""
        self._send("run")
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise RunFailed(f"the side {self.name} failed:\n{self._errors.read()[-3000:]}")
        result = json.loads(answer)
        self.tokens = result["tokens"]
        self.rounds.append(result["seconds"])

    def close(self) -> None:
        """Ends the worker."""
        self._process.terminate()
        self._process.communicate()
        self._errors.close()

    def speeds(self) -> list[float]:
        """Tokens per second of every round after the first."""
        return [self.tokens / seconds for seconds in self.rounds[1:]]

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def measure(sizes: dict[str, int], rounds: int, console: Console) -> dict:
    """Runs ``rounds`` rounds of each side in turns after a first one; returns speeds and their ratio per round."""
    with tempfile.TemporaryDirectory() as directory:
        sides: list[Side] = []
        try:
            for name in SIDES:
                sides.append(Side(name, sizes, directory))
            for _ in track(range(rounds + 1), f"batch {sizes['batch']}", console=console, transient=True):
                for side in sides:
                    side.run()
        finally:
            for side in sides:
                side.close()
    ours, theirs = (side.speeds() for side in sides)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    first = {f"{side.name}_first_s": side.rounds[0] for side in sides}
    return {**sizes, "mindllm": ours, "transformers": theirs, "ratio": ratios, **first}


def show(results: Sequence[dict], console: Console) -> None:
    """Prints the median, with the lowest and highest, of every measure."""
    table = Table("batch", "mindllm tokens/s", "transformers tokens/s", "ratio", "first call s")
    for result in results:
        spreads = [
            _spread(result[name], digits) for name, digits in (("mindllm", 0), ("transformers", 0), ("ratio", 2))
        ]
        first = f"{result['mindllm_first_s']:.1f} / {result['transformers_first_s']:.1f}"
        table.add_row(str(result["batch"]), *spreads, first)
    console.print(table)


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds to FILE")
    options = vars(parser.parse_args(arguments))
    batches, rounds, file = (options.pop(name) for name in ("batch", "rounds", "json"))
    options["kv_heads"] = options["kv_heads"] or options["hidden"] // HEAD_DIM
    console = Console(soft_wrap=True)
    results = [measure({**options, "batch": batch}, rounds, console) for batch in batches]
    show(results, console)
    if file is not None:
        with atomic_open(file) as handle:
            json.dump(results, handle, indent=2)
    return 0


if __name__ == "__main__":
    run_command(main)
