"""One verb in two checkouts, which take turns: seconds of processors, memory, and whether both print the same figures.

Every round starts with nothing kept, in both. What compiled graphs and simulations say must not depend on how fast they come.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_file, positive, run_command
from mindllm.errors import RunFailed
from mindllm.jobs.memory import memory_of_tree
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.units import GIB
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import ROOT, spread

EXAMPLES = """example:
  git worktree add ../before HEAD~5
  python -m toolkit.benchmark.two_checkouts --before ../before --rounds 3 dry-run configs/llama2/pretrain_llama2_13b.yaml
"""
POLL_SECONDS = 0.5
KEPT_AGAIN = ("dry_run", "graphs")  # in the cache: what is made anew in every round
ANSWERS = (0, 3)  # exit codes of a verb that has said what it found
TIMES = frozenset({"seconds", "memory"})  # of a report: what may differ
COLUMNS = (
    "run",
    "rounds",
    "processor seconds before",
    "now",
    "ratio",
    "seconds before",
    "now",
    "GB before",
    "now",
    "figures",
)


@dataclass(frozen=True)
class Made:
    """A run of the verb: processor seconds of all its processes, seconds, the most bytes they held together, its report."""

    processor: float
    seconds: float
    memory: int
    report: Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every configuration in both checkouts, round after round, and prints the table."""
    parser = CommandParser(prog="python -m toolkit.benchmark.two_checkouts", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("verb", help="dry-run, check, …: a verb that knows --config and --json")
    parser.add_argument("configs", nargs="+", type=Path, metavar="YAML")
    parser.add_argument("--before", type=Path, required=True, metavar="DIRECTORY", help="the other checkout")
    parser.add_argument("--rounds", type=positive, default=3, help="of both for each YAML (default: 3)")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the table as a page")
    options = parser.parse_args(arguments)
    table, rows = Table("", [*texts(COLUMNS[0]), *figures(*COLUMNS[1:])]), []
    with tempfile.TemporaryDirectory(prefix="mindllm_two_") as directory:
        checkouts = {"before": options.before.resolve(), "now": ROOT}
        for config in options.configs:
            made = _rounds(
                checkouts, [options.verb, "--config", str(config.resolve())], options.rounds, Path(directory)
            )
            rows.append(_row(config.stem, made))
            output.print("  ".join(rows[-1]))
    for row in rows:
        table.add_row(*row)
    output.print(table)
    if options.markdown:
        command = (
            f"python -m toolkit.benchmark.two_checkouts --before ../before --rounds {options.rounds} {options.verb} …"
        )
        title = f"`mindllm {options.verb}` in two checkouts"
        write_markdown(options.markdown, title, __doc__ or "", command, [(options.verb, COLUMNS, rows)], "Read")
    return 0


def _rounds(
    checkouts: Mapping[str, Path], command: Sequence[str], rounds: int, directory: Path
) -> Mapping[str, list[Made]]:
    """All rounds of both sides; who begins changes from round to round."""
    made: dict[str, list[Made]] = {side: [] for side in checkouts}
    for number in range(rounds):
        for side in sorted(checkouts, reverse=number % 2 == 1):
            made[side].append(run_once(checkouts[side], command, directory / side))
    return made


def run_once(checkout: Path, command: Sequence[str], directory: Path) -> Made:
    """Run the verb of a checkout with nothing kept; ``directory`` is its own, and holds what is made once for a machine.

    Raises:
        RunFailed: the verb ended without an answer.
    """
    cache = directory / "cache"
    for kept in KEPT_AGAIN:
        shutil.rmtree(cache / "mindllm" / kept, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(cache)}
    with open(directory / "report", "w+b") as report, open(directory / "log", "w+b") as log:
        begun, most = time.perf_counter(), 0
        process = subprocess.Popen(
            [sys.executable, "-m", "mindllm", *command, "--json"],
            cwd=directory,
            env=variables,
            stdout=report,
            stderr=log,
        )
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            most = max(most, memory_of_tree(process.pid))
            time.sleep(POLL_SECONDS)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        ended = time.perf_counter()
    if process.returncode not in ANSWERS:
        raise RunFailed(f"{checkout}: {' '.join(command)} ended with {process.returncode}; see {directory / 'log'}")
    found = json.loads((directory / "report").read_text(encoding="utf-8"))
    return Made(used.ru_utime + used.ru_stime, ended - begun, most, found)


def _row(name: str, made: Mapping[str, Sequence[Made]]) -> list[str]:
    before, now = made["before"], made["now"]
    ratios = [two.processor / one.processor for one, two in zip(before, now, strict=True)]
    cells = [name, str(len(now))]
    cells += [spread([one.processor for one in side], 0) for side in (before, now)] + [spread(ratios, 2)]
    cells += [f"{statistics.median(one.seconds for one in side):,.0f}" for side in (before, now)]
    cells += [f"{max(one.memory for one in side) / GIB:,.3f}" for side in (before, now)]
    return [*cells, "equal" if not (found := different(before[0].report, now[0].report)) else f"{len(found)} differ"]


def different(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Return the keys at which two reports differ, times and memory of this machine aside."""
    left, right = dict(_leaves(one)), dict(_leaves(two))
    return [key for key in {**left, **right} if left.get(key) != right.get(key)]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in TIMES:
                yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{number}]")
    else:
        yield key, value


if __name__ == "__main__":
    run_command(main)
