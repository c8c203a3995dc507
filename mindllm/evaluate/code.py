"""Whether a program that a model wrote passes its test: run in a child process with bounds, never in this one."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mindllm.errors import UserError
from mindllm.evaluate.code_child import MACHINES

SECONDS = 10
MEMORY = 1 << 30
FILE_SIZE = 1 << 20
FILES, ALL_FILES_SIZE = 256, 16 << 20  # in its directory, before it is ended
LOOK_SECONDS = 0.05  # between two looks at its directory
CHILD = Path(__file__).with_name("code_child.py")


def passes(program: str, test: str, seconds: float = SECONDS) -> bool:
    """Whether ``program`` followed by ``test`` runs to its end without an error.

    That end says a word nobody can guess: a program that ends the process by itself does not pass.

    Raises:
        UserError: this machine has no bounds for it.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in MACHINES:
        raise UserError(
            f"code is run under bounds of Linux's kernel, on {' or '.join(MACHINES)}; this is {sys.platform} "
            f"on {platform.machine()}: evaluate without HumanEval"
        )
    word = secrets.token_hex(16)
    source = f"{program}\n{test}\nprint({word!r})\n"
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryFile() as written,
    ):  # a file is bounded, a pipe is not
        command = [sys.executable, "-I", str(CHILD), str(int(seconds) + 1), str(MEMORY), str(FILE_SIZE)]
        child = subprocess.Popen(
            command,
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _give(child, source)
            if not _ends_in_bounds(child, Path(directory), time.monotonic() + seconds):
                return False
        finally:
            _end(child)
        written.seek(0)
        return child.returncode == 0 and written.read(FILE_SIZE + 1).rstrip().endswith(word.encode())


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
