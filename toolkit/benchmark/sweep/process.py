"""A command as a process of its own, watched: what it printed, how it ended, and the most memory it took with its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindllm.jobs.process import die_with_parent

INTERVAL = 0.1  # seconds between two looks at its memory
GROUP, RESIDENT = 2, 21  # fields of /proc/PID/stat behind the name: process group, resident pages
OUT_OF_MEMORY = (
    "MemoryError",
    "std::bad_alloc",
    "out of memory",
    "Allocate memory failed",
    "too little memory",
    "Cannot allocate",
)


@dataclass(frozen=True)
class Ended:
    """``over`` says which limit ended it: memory, time, or none (empty); ``later_bytes``: the peak once ``begun`` was written."""

    code: int
    output: str
    errors: str
    peak_bytes: int
    later_bytes: int
    over: str

    @property
    def out_of_memory(self) -> bool:
        """Whether memory was what it lacked: by its limit, by the system, or by its own words."""
        killed = self.code == -signal.SIGKILL and self.over != "time"
        said = self.code != 0 and any(word in self.errors + self.output for word in OUT_OF_MEMORY)
        return self.over == "memory" or killed or said


def watched(
    command: Sequence[str],
    logs: Path,
    memory: int | None,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    begun: Path | None = None,
) -> Ended:
    """Runs ``command`` to its end, or to that of ``memory`` bytes or ``seconds``.

    Args:
        logs: where its output goes.
        environment: added to this process's.
        begun: a file that is empty, or not there, until what is to be measured begins.
    """
    logs.mkdir(parents=True, exist_ok=True)
    peak, later, over, deadline = 0, 0, "", time.monotonic() + seconds
    with open(logs / "output", "w+b") as output, open(logs / "errors", "w+b") as errors:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=die_with_parent,  # a sweep that is killed leaves no run behind
        )
        try:
            while process.poll() is None:
                taken = resident_bytes(process.pid)
                peak = max(peak, taken)
                if begun is not None and begun.is_file() and begun.stat().st_size:
                    later = max(later, taken)
                over = "memory" if memory and peak > memory else "time" if time.monotonic() > deadline else ""
                if over:
                    break
                time.sleep(INTERVAL)
        finally:
            _end(process)
        printed, told = (Path(file.name).read_text(encoding="utf-8", errors="replace") for file in (output, errors))
    return Ended(process.returncode, printed, told, peak, later, over)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children, if they are still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resident_bytes(group: int) -> int:
    """What the processes of a group have in memory."""
    pages = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[GROUP]) == group:
            pages += int(fields[RESIDENT])
    return pages * os.sysconf("SC_PAGE_SIZE")
