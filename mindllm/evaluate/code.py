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
from pathlib import Path

from mindllm.errors import UserError
from mindllm.evaluate.code_child import CALLS

SECONDS = 10
MEMORY = 1 << 30
FILE_SIZE = 1 << 20
CHILD = Path(__file__).with_name("code_child.py")


def passes(program: str, test: str, seconds: float = SECONDS) -> bool:
    """Whether ``program`` followed by ``test`` runs to its end without an error.

    That end says a word nobody can guess: a program that ends the process by itself does not pass.

    Raises:
        UserError: this machine has no bounds for it.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in CALLS:
        raise UserError(
            f"code is run under bounds of Linux's kernel, on {' or '.join(CALLS)}; this is {sys.platform} "
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
            child.communicate(source.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child)
        written.seek(0)
        return child.returncode == 0 and written.read(FILE_SIZE + 1).rstrip().endswith(word.encode())


def _end(child: subprocess.Popen) -> None:
    """Ends the child and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
