"""Whether a program that a model wrote passes its test: run in a child process with bounds, never in this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import pwd
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from mindllm.errors import UserError
from mindllm.evaluate.code_filter import MACHINES, filter_program

SECONDS = 10
MEMORY = 1 << 30
FILE_SIZE = 1 << 20
FILES, ALL_FILES_SIZE = 256, 16 << 20  # in its directory, before it is ended
LOOK_SECONDS = 0.05  # between two looks at its directory
BOUNDED, STATUS_SIZE = b"bounded", 1000  # what the child tells before the program begins
NOBODY = 65534  # the kernel's number for a user it has no other for
LANDLOCK_CREATE, LANDLOCK_VERSION, LANDLOCK_TRUNCATE = 444, 1, 3
CHILD = Path(__file__).with_name("code_child.py")


def passes(program: str, test: str, seconds: float = SECONDS) -> bool:
    """Whether ``program`` followed by ``test`` runs to its end without an error.

    That end says a word nobody can guess: a program that ends the process by itself does not pass.

    Raises:
        UserError: this machine has no bounds for it; then it has not run.
    """
    word = secrets.token_hex(16)
    source = f"{program}\n{test}\nprint({word!r})\n"
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryFile() as written,
    ):  # a file is bounded, a pipe is not
        child, status = _start(_bounds(seconds), directory, written)
        try:
            _give(child, source)
            _demand_bounds(status)
            if not _ends_in_bounds(child, Path(directory), time.monotonic() + seconds):
                return False
        finally:
            _end(child)
        written.seek(0)
        return child.returncode == 0 and written.read(FILE_SIZE + 1).rstrip().endswith(word.encode())


def demand_bounds() -> None:
    """Raises UserError where programs of others cannot be run under bounds on this machine."""
    if not passes("", ""):
        raise UserError("an empty program does not run under bounds on this machine; evaluate without HumanEval")


def _bounds(seconds: float) -> list[str]:
    """What the child is to be bound by, as its arguments."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in MACHINES:
        raise UserError(
            f"code is run under bounds of Linux's kernel, on {' or '.join(MACHINES)}; this is {sys.platform} "
            f"on {machine}: evaluate without HumanEval"
        )
    truncate = landlock_version() >= LANDLOCK_TRUNCATE
    figures = [int(seconds) + 1, MEMORY, FILE_SIZE, *other_user()]
    return [*map(str, figures), filter_program(machine, truncate).hex()]


def other_user() -> tuple[int, int]:
    """User and group that programs run as where this process is root's: nobody's; zeros where it is not."""
    if os.geteuid() and os.getuid():
        return 0, 0
    with contextlib.suppress(KeyError):
        entry = pwd.getpwnam("nobody")
        if entry.pw_uid and entry.pw_gid:
            return entry.pw_uid, entry.pw_gid
    return NOBODY, NOBODY


def landlock_version() -> int:
    """The version of Landlock that the kernel offers; 0 or below where there is none."""
    return ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION)


def _start(bounds: list[str], directory: str, written: IO[bytes]) -> tuple[subprocess.Popen, int]:
    """Starts the child; returns it and the descriptor it tells on that it is bounded."""
    status, of_child = os.pipe()
    user, group = map(int, bounds[3:5])
    if user:
        os.chown(directory, user, group)
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD), *bounds, str(of_child)],
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=subprocess.DEVNULL,
            pass_fds=[of_child],
            start_new_session=True,
        )
    except BaseException:
        os.close(status)
        raise
    finally:
        os.close(of_child)
    return child, status


def _demand_bounds(status: int) -> None:
    """Waits until the child tells that it has given up what the program should not have, which it does before it runs that."""
    with open(status, "rb") as pipe:
        if (told := pipe.read(STATUS_SIZE)) != BOUNDED:
            why = told.decode("utf-8", "replace") or "the process that gives up its rights has ended"
            raise UserError(f"no bounds for code of others: {why}; evaluate without HumanEval")


def _give(child: subprocess.Popen, source: str) -> None:
    """Writes the program to the child, which reads all of it before it does anything."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(source.encode("utf-8", "replace"))


def _ends_in_bounds(child: subprocess.Popen, directory: Path, deadline: float) -> bool:
    """Waits for the child's end; false at the deadline, or when it has written more to ``directory`` than it may."""
    while True:
        try:
            child.wait(timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline or _is_full(directory):
                return False
        else:
            return True


def _is_full(directory: Path) -> bool:
    """Whether there are too many files, directories included, or too much in them."""
    count = size = 0
    for parent, folders, files in os.walk(directory):
        count += len(folders) + len(files)
        if count > FILES:
            return True
        for name in files:
            with contextlib.suppress(OSError):  # gone by now
                size += Path(parent, name).lstat().st_size
    return size > ALL_FILES_SIZE


def _end(child: subprocess.Popen) -> None:
    """Ends the child and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
