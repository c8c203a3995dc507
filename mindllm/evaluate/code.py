"""Whether a program that a model wrote passes its test: both run in child processes with bounds, never in this one."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
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


def passes(program: str, test: str, seconds: float = SECONDS, given: str = "", entry: str = "") -> bool:
    """Return True if ``test`` runs to its end without an error on the functions of ``program``.

    Program and test run in processes of their own. The program gets the arguments of each call and returns values; it sees
    neither the test nor the verdict, which is the exit code of the other process (:mod:`mindllm.evaluate.code_calls`).

    Args:
        given: definitions that the test uses, whatever the program makes of them, as the beginning of the problem has them.
        entry: the name among them that is the program's.

    Raises:
        UserError: this machine has no bounds for programs of others; then nothing has run.
    """
    bounds, sides = _bounds(seconds), list[subprocess.Popen]()
    sources = {"program": [program], "test": [given, entry, test]}
    with ExitStack() as stack:
        directories = {role: stack.enter_context(tempfile.TemporaryDirectory()) for role in sources}
        pipes = [os.pipe(), os.pipe()]
        ends = {"program": (pipes[0][0], pipes[1][1]), "test": (pipes[1][0], pipes[0][1])}
        try:
            statuses = []
            for role in sources:
                child, status = _start([*bounds], directories[role], role, ends[role])
                sides.append(child)
                statuses.append(stack.enter_context(open(status, "rb")))
        finally:
            for descriptor in (*pipes[0], *pipes[1]):
                os.close(descriptor)
            for child in sides:
                stack.callback(_end, child)
        for child, role in zip(sides, sources, strict=True):
            _give(child, sources[role])
        for pipe in statuses:
            _demand_bounds(pipe)
        places = [Path(place) for place in directories.values()]
        return _ends_in_bounds(sides[1], places, time.monotonic() + seconds) and sides[1].returncode == 0


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


def _start(bounds: list[str], directory: str, role: str, ends: tuple[int, int]) -> tuple[subprocess.Popen, int]:
    """Start a side with its ends of the pipes; return it and the descriptor on which it reports that it is bounded."""
    status, of_child = os.pipe()
    user, group = map(int, bounds[3:5])
    if user:
        os.chown(directory, user, group)
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD), *bounds, str(of_child), role, *map(str, ends)],
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[of_child, *ends],
            start_new_session=True,
        )
    except BaseException:
        os.close(status)
        raise
    finally:
        os.close(of_child)
    return child, status


def _demand_bounds(status: IO[bytes]) -> None:
    """Wait until a side reports that it has given up what a program should not have, which it does before it runs one."""
    if (reported := status.read(STATUS_SIZE)) != BOUNDED:
        why = reported.decode("utf-8", "replace") or "the process that gives up its rights has ended"
        raise UserError(f"no bounds for code of others: {why}; evaluate without HumanEval")


def _give(child: subprocess.Popen, sources: list[str]) -> None:
    """Write the sources to a side, which reads all of them before it does anything."""
    assert child.stdin is not None
    whole = [source.encode("utf-8", "replace").decode() for source in sources]
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(json.dumps(whole).encode())


def _ends_in_bounds(child: subprocess.Popen, directories: list[Path], deadline: float) -> bool:
    """Wait for the end of a side; return False at the deadline, or if too much was written to a directory."""
    while True:
        try:
            child.wait(timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline or any(map(_is_full, directories)):
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
