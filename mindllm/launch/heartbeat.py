"""Signs of life: each rank writes what it does into a small file beside its log, and the launcher tells from it who hangs.

A file and not a message, because a rank that hangs may do so anywhere, and because it works under any launcher, msrun included.
Times are of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mindllm.outside import parse_json

DIRECTORY = "MINDLLM_HEARTBEATS"  # environment variable: where ranks write
ENDING = "its end, after an error"
FIRST_STEP_FACTOR = 10
WIDTH = 256  # bytes of a file, always: a new beat overwrites the last one in place
DOING = 100  # characters of what is being done
DUMP_SIGNAL = signal.SIGUSR1  # makes a rank write the stacks of its threads into its log


@dataclass(frozen=True)
class Beat:
    """A sign of life: the last step that was done, what is being done since ``at``, seconds that may take (0: any).

    ``trained``: whether the process has done a step itself.
    """

    pid: int
    step: int
    doing: str
    at: float
    limit: float
    trained: bool = False

    def is_overdue(self, now: float) -> bool:
        return bool(self.limit) and now - self.at > self.limit

    def seen(self, at: float) -> Beat:
        """The same sign of life, by another clock."""
        return replace(self, at=at)


def beat_of(fields: Any) -> Beat:
    """The sign of life that somebody else has written; raises Key-, Overflow-, Type- or ValueError where it is none."""
    pid, step, at, limit = (fields[name] for name in ("pid", "step", "at", "limit"))
    if type(pid) is not int or type(step) is not int or pid < 1 or not math.isfinite(at) or not math.isfinite(limit):
        raise ValueError("no sign of life")
    return Beat(pid, step, str(fields["doing"])[:DOING], float(at), float(limit), fields["trained"] is True)


class Heart:
    """A rank's side. Does nothing where no launcher watches, or before ``start``."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._limit = 0.0
        self._step: int | None = None
        self._steps_seen = False

    def start(self, step_timeout: float) -> None:
        """Begins to give signs of life; ``step_timeout`` in seconds, 0 for none."""
        if self._file is not None or not self._open():
            return
        self._limit = step_timeout
        faulthandler.register(DUMP_SIGNAL, file=sys.__stderr__ or 2, all_threads=True)
        self.beat("starting")

    def beat(self, doing: str, step: int | None = None) -> None:
        """Says what this rank does from now on, and the last step it has done."""
        if self._file is None:
            return
        if step is not None:
            self._steps_seen |= self._step is not None and step > self._step
            self._step = step
        self._write(doing, self._limit * (1 if self._steps_seen else FIRST_STEP_FACTOR))

    def end(self, seconds: float) -> None:
        """Says that this rank ends after an error, which takes ``seconds`` at most; also before ``start``."""
        with suppress(OSError):  # the error itself is told
            if self._file is not None or self._open():
                self._write(ENDING, seconds)

    def _open(self) -> bool:
        """Opens this rank's file; False where no launcher watches."""
        if (directory := os.environ.get(DIRECTORY)) is None:
            return False
        path = beat_path(Path(directory), int(os.environ.get("RANK_ID", "0")))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        return True

    def _write(self, doing: str, limit: float) -> None:
        assert self._file is not None
        beat = Beat(os.getpid(), self._step or 0, doing[:DOING], time.monotonic(), limit, self._steps_seen)
        with suppress(OSError):  # a full disk is told of by what is lost to it
            os.pwrite(self._file, json.dumps(asdict(beat)).encode().ljust(WIDTH), 0)


heart = Heart()


def is_watched() -> bool:
    """Whether a launcher of ours watches this process, msrun between them or not."""
    return DIRECTORY in os.environ


def beat_path(directory: Path, rank: int) -> Path:
    """The file of a rank."""
    return directory / f"heartbeat_{rank}.json"


def read_beats(directory: Path, ranks: Iterable[int]) -> dict[int, Beat]:
    """The last signs of life, of ranks that have given one."""
    beats = {}
    for rank in ranks:
        with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            beats[rank] = beat_of(parse_json(_read(beat_path(directory, rank))))
    return beats


def _read(path: Path) -> bytes:
    """The first bytes of a file, whatever lies there by that name."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(handle, 4 * WIDTH)
    finally:
        os.close(handle)


def forget_beats(directory: Path, ranks: Iterable[int]) -> None:
    """Removes the signs of life of an earlier job."""
    for rank in ranks:
        beat_path(directory, rank).unlink(missing_ok=True)


def last_steps(beats: Mapping[int, Beat]) -> str:
    """``last step of each rank: 12 (ranks 0-5, 7), 11 (rank 6)``; empty where none has begun."""
    by_step: dict[int, list[int]] = {}
    for rank, beat in sorted(beats.items()):
        by_step.setdefault(beat.step, []).append(rank)
    found = ", ".join(f"{step} ({named_ranks(ranks)})" for step, ranks in sorted(by_step.items(), reverse=True))
    return f"last step of each rank: {found}" if found else ""


def named_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-5, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {text}"


def hanging(beats: Mapping[int, Beat], waiting: Iterable[int], now: float) -> list[int]:
    """Ranks that hang: of those that do not wait for others, the ones whose sign of life is overdue.

    Who waits may do so as long as those it waits for give signs of life: one rank may have more to do than the others.
    """
    return sorted(rank for rank in set(beats) - set(waiting) if beats[rank].is_overdue(now))


def describe_hang(beats: Mapping[int, Beat], ranks: Iterable[int], now: float) -> str:
    """Which ranks hang, where, for how long, and the key that says so."""
    found = sorted(ranks)
    beat = beats[found[0]]
    return (
        f"{named_ranks(found)} hang{'s' if len(found) == 1 else ''}: no sign of life for {now - beat.at:.0f} s "
        f"(in {beat.doing}; {'that' if beat.doing == ENDING else 'runner_config.step_timeout'} allows {beat.limit:.0f} s)"
    )
