"""Cores that several pieces of work share: each of their processes that compiles waits until one is free.

Work that is begun together, as the pieces of a proof are, would otherwise start as many compilers each as there are cores; two on
each core took an eighth more processor time. A core is a file in a directory that the environment names: its lock is the core.
A process that ends, however it ends, gives it back. Work that ends with a part on one core may keep the first one for itself:
what could fill both is then not left to the end, when the other would idle.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

VARIABLE, FILE, KEPT = "MINDLLM_CORES", "core_", "kept"
POLL_SECONDS = 0.05


def cores() -> int:
    """Return how many cores this process may use, as far as the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(directory: Path) -> dict[str, str]:
    """Return variables by which processes share as many cores as there are; ``directory`` must outlive them."""
    for number in range(cores()):
        (directory / f"{FILE}{number}").touch()
    (directory / KEPT).touch()
    return {VARIABLE: str(directory)}


@contextmanager
def first_core_kept() -> Iterator[None]:
    """While the block runs the first of the shared cores is for ``Core(keeper=True)`` and for this process, which takes none."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        yield
        return
    handle = os.open(Path(directory) / KEPT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


class Core:
    """A core to compile on: waits for one, and has it until it is given back or this process ends.

    Where none are shared it waits for nothing. Forks have it as well: give it back before they begin, where they shall wait.

    Args:
        keeper: this is a part of the work that keeps the first core (:func:`first_core_kept`).
    """

    def __init__(self, keeper: bool = False) -> None:
        self._held = _waited_for(keeper)

    def give_back(self) -> None:
        """Let another process have it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __enter__(self) -> Core:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.give_back()


def _waited_for(keeper: bool) -> int | None:
    """The locked file of a core; None where none are shared."""
    directory = os.environ.get(VARIABLE)
    files = sorted(Path(directory).glob(f"{FILE}*")) if directory else []
    handles = [os.open(file, os.O_RDWR | os.O_CLOEXEC) for file in files]
    while directory and handles:
        usable = handles if keeper or not _is_first_kept(Path(directory)) else handles[1:]
        if (free := next(filter(_locked, usable), None)) is not None:
            for other in handles:
                if other != free:
                    os.close(other)
            return free
        time.sleep(POLL_SECONDS)
    return None


def _is_first_kept(directory: Path) -> bool:
    try:
        handle = os.open(directory / KEPT, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    kept = not _locked(handle)
    os.close(handle)
    return kept


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
