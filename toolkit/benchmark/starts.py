"""How often MindSpore crashes while the ranks of a job connect, and whether the launcher saves the job, on a busy machine."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.terminal.console import output, print_json, track
from mindllm.terminal.tables import Table, texts
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import ROOT

EXAMPLES = """example:
  python -m toolkit.benchmark.starts --starts 50 --ranks 4 --busy 4 --markdown docs/benchmarks/starts.md
"""
AGAIN = "starting the ranks again"
COLUMNS = (
    "starts",
    "ranks",
    "busy processes",
    "load",
    "good at once",
    "good after crashes",
    "crashes",
    "failed",
    "median s",
)


@dataclass(frozen=True)
class Start:
    """One job: how often its ranks crashed and were started again, how it ended, how long it took, how busy the machine was."""

    crashes: int
    exit_code: int
    seconds: float
    load: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts jobs one after the other; returns 0, however they end."""
    parser = CommandParser(prog="python -m toolkit.benchmark.starts", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--starts", type=int, default=50, help="jobs (default: 50)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each (default: 4)")
    parser.add_argument("--busy", type=int, default=0, help="processes that only compute meanwhile (default: 0)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="writes the table there, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    found: list[Start] = []
    with busy(options.busy):
        for _ in track(range(options.starts), "starts"):
            found.append(start(options.ranks))
            if options.markdown:  # each time: it takes long, and may be ended before it is done
                write(options.markdown, summary(found, options.ranks, options.busy))
    if options.json:
        print_json({"starts": [asdict(item) for item in found]})
    else:
        output.print(Table("", texts(*COLUMNS), [summary(found, options.ranks, options.busy)]))
    return 0


DESCRIPTION = """MindSpore 2.10 crashes now and then (a segmentation fault in the thread that receives messages) while the
processes of a CPU job connect. `python -m mindllm.launch` then starts all ranks again, five times at most. Each start here is a
job of its own whose ranks connect, add one array with `AllReduce`, and end. `load` is the machine's load (processes that want to
compute at a time, over one minute) at the end of a start, the mean of all."""


def write(path: Path, row: Sequence[str]) -> None:
    """The page with the starts so far."""
    count, ranks, busy_processes, *_ = row
    command = f"python -m toolkit.benchmark.starts --starts {count} --ranks {ranks} --busy {busy_processes}"
    write_markdown(path, "Starts of several ranks", DESCRIPTION, command, [("Starts", COLUMNS, [row])])


def start(ranks: int) -> Start:
    """Starts a job and waits for its end."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mindllm_starts_") as directory:
        command = [sys.executable, "-m", "mindllm.launch", "--workers", str(ranks), "--log_dir", "log"]
        done = subprocess.run(
            [*command, str(Path(__file__).with_name("workers") / "starts.py")],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    return Start(done.stdout.count(AGAIN), done.returncode, time.monotonic() - begun, os.getloadavg()[0])


def summary(found: Sequence[Start], ranks: int, busy_processes: int) -> tuple[str, ...]:
    """A row of the table. A job that failed crashed once more than it was started again, or ended with another error."""
    good = [item for item in found if item.exit_code == 0]
    seconds = sorted(item.seconds for item in found)
    return (
        str(len(found)),
        str(ranks),
        str(busy_processes),
        f"{sum(item.load for item in found) / len(found):.1f}",
        str(sum(item.crashes == 0 for item in good)),
        str(sum(item.crashes > 0 for item in good)),
        str(sum(item.crashes for item in found)),
        str(len(found) - len(good)),
        f"{seconds[len(seconds) // 2]:.0f}",
    )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute inside."""
    processes = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute() -> None:
    while True:
        pass


if __name__ == "__main__":
    run_command(main)
