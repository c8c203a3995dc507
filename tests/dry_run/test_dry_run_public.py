"""The dry run of every public YAML of MindFormers that converts: its first stage, in bounded time and memory.

Time is that of processors, which other programs on the machine do not change: two minutes are one on two cores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from public_yamls import converting_yamls

ROOT = Path(__file__).resolve().parents[2]
CPU_SECONDS, MEMORY = 120, 3 << 30  # of the command with all it starts
ENDLESS = 1800  # seconds after which it is ended
OPTIONS = (
    "--stages",
    "0",
    "--json",
    "--workers",
    "2",
    "--max_device_memory",
    "4000GB",
)  # which fits: no advice is given
POLL_SECONDS = 1.0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_public_yaml_is_dry_run_in_bounded_time_and_memory(tmp_path):
    problems = [f"{name}: {problem}" for name, path in converting_yamls() if (problem := problem_of(path, tmp_path))]
    assert not problems, "\n".join(problems)


def problem_of(path: Path, directory: Path) -> str:
    """Why the dry run of the first stage of a YAML is no good; empty if it is."""
    before = cpu_seconds()
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit.dry_run", "--config", str(path), *OPTIONS, "--output", str(directory / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(directory / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    taken: list[int] = []
    watching = threading.Thread(target=watch, args=(process, taken))
    watching.start()
    try:
        printed, errors = process.communicate(timeout=ENDLESS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return f"no end in {ENDLESS} s"
    finally:
        watching.join()
    if process.returncode != 0:
        return f"exit code {process.returncode}: {errors[-300:]}"
    if json.loads(printed)["stages"][0]["used_peak_mb"] <= 0:
        return f"no memory: {printed}"
    if cpu_seconds() - before > CPU_SECONDS:
        return f"{cpu_seconds() - before:.0f} processor seconds"
    return f"{max(taken) >> 20} MB" if max(taken) > MEMORY else ""


def cpu_seconds() -> float:
    """Processor time of all processes that were started here and have ended, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def watch(process: subprocess.Popen, taken: list[int]) -> None:
    """Adds, until a process ends, the bytes it takes with all below it."""
    while True:
        taken.append(sum(map(bytes_of, below(process.pid))))
        try:
            process.wait(POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


def below(pid: int) -> list[int]:
    """A process, and all that it and they have started."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(directory.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def bytes_of(pid: int) -> int:
    """Memory of a process, of what it shares with others its part; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
