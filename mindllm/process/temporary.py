"""Temporary directories and child processes, of which nothing is left when a process is ended by a signal.

Only the standard library is imported here, and little of it: this is part of what a command line does first.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST_END = 2.0  # seconds that processes which were killed may take
_paths: set[str] = set()
_observers: list[Callable[[set[str]], None]] = []


def observe_paths(observer: Callable[[set[str]], None]) -> None:
    """Have ``observer`` called with all paths that go with this process, whenever they change."""
    _observers.append(observer)


def goes_with_this_process(path: Path | str) -> None:
    """Has a file or directory removed when a signal ends this process."""
    _paths.add(str(path))
    for observer in _observers:
        observer(_paths)


def stays(path: Path | str) -> None:
    """Takes back :func:`goes_with_this_process`."""
    _paths.discard(str(path))
    for observer in _observers:
        observer(_paths)


def make_temporary(prefix: str, parent: Path | str | None = None) -> Path:
    """A new directory, which :func:`remove_temporary` removes, or a signal that ends this process."""
    import tempfile

    directory = tempfile.mkdtemp(prefix=prefix, dir=parent)
    goes_with_this_process(directory)
    return Path(directory)


def remove_temporary(directory: Path | str) -> None:
    """Removes what :func:`make_temporary` made, if it is there."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
    stays(directory)


@contextmanager
def temporary_directory(prefix: str, parent: Path | str | None = None) -> Iterator[Path]:
    """A directory that goes with the block."""
    directory = make_temporary(prefix, parent)
    try:
        yield directory
    finally:
        remove_temporary(directory)


def open_private_directory(path: Path | str) -> int:
    """Create a directory of mode 0700 if it is missing, and return a descriptor of it.

    Work relative to the descriptor: a name below a shared directory can become a link at any moment.

    Raises:
        OSError: it cannot be created or opened, is a link, belongs to another user, or is open to other users.
    """
    with suppress(FileExistsError):
        Path(path).mkdir(0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return descriptor
    os.close(descriptor)
    reason = f"belongs to user {state.st_uid}, or is open to others (mode {stat.S_IMODE(state.st_mode):o})"
    raise PermissionError(errno.EPERM, reason, os.fspath(path))


def may_be_planted(path: Path | str) -> bool:
    """Return True if another user may have created ``path``: anyone can write to its parent, and it is not this user's."""
    path = Path(path)
    return bool(path.parent.stat().st_mode & stat.S_IWOTH) and path.lstat().st_uid != os.geteuid()


def leave_nothing() -> None:
    """Kills all processes below this one and removes all temporary directories; for a process that ends at once."""
    end_descendants(os.getpid())
    for path in list(_paths):
        remove_temporary(path)
        with suppress(OSError):
            Path(path).unlink()


def end_descendants(process: int, spared: Collection[int] = ()) -> None:
    """Kill all processes below one, but for those that are ``spared``; return when they have ended, or after some seconds."""
    end = time.monotonic() + LONGEST_END
    while (living := set(_below(process)) - set(spared)) and time.monotonic() < end:
        for each in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.01)


def _below(process: int) -> list[int]:
    """The processes that ``process`` has started, and those that they have, but for those that have ended."""
    found = []
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text(encoding="ascii").split()]
    return [each for child in found if _lives(child) for each in (child, *_below(child))]


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return state.split()[0] not in "ZX"
    except OSError:
        return False
