"""Subprocesses: their environment, their log, and their end, which includes everything they have started."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.process.temporary import temporary_directory
from mindllm.sources import python_path

SHOWN_LINES, SHOWN_BYTES = 15, 8192  # of a log's end
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
POLL_SECONDS = 0.2
INTERRUPT_SECONDS = 120.0  # a run may take to save a checkpoint after an interrupt
ERROR = "error: "
libc = ctypes.CDLL(None, use_errno=True)


class JobProcess:
    """A process that dies with this one. It has a session of its own: Ctrl-C in the terminal does not reach it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        connection: socket.socket | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.code: int | None = None
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "COLUMNS": str(shutil.get_terminal_size().columns),
                    **environment,
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[] if connection is None else [connection.fileno()],
                preexec_fn=die_with_parent,
            )

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that killed the process; None while it runs.

        The process stays a zombie until ``kill``, and the lock of ``Popen`` is not used: a second signal that raises
        KeyboardInterrupt while that lock is held would never release it, and whoever waits next would wait forever.
        """
        if self.code is None:
            self.code = self._peek(os.WNOHANG)
        return self.code

    def send(self, number: int) -> None:
        """Send a signal to the process, not to its children."""
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process and everything it has started immediately."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.code is None:
            self.code = self._peek(0)
        with suppress(ChildProcessError):  # an interrupt came after it
            os.waitpid(self.process.pid, 0)
        self.process.returncode = self.code

    def _peek(self, options: int) -> int | None:
        """Return the exit code without reaping the process."""
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | options)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def ending(self) -> str:
        """Describe how the process ended."""
        return ending(self.poll())

    def last_lines(self) -> str:
        """Return the end of its log."""
        return last_lines(self.log)


def ending(code: int | None) -> str:
    """Describe an exit code, or minus the number of the signal that killed a process."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def last_lines(log: Path) -> str:
    """Return the end of a log, indented, or an empty string if the file is missing."""
    if not log.is_file():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES))
        lines = file.read(SHOWN_BYTES).decode("utf-8", "replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:])


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, however that ends."""
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def run_yaml_in_child(text: str, mode: str, on_poll: Callable[[], None] = lambda: None) -> None:
    """Run a YAML in one of the run modes, in a child process. Raises what :func:`run_child` raises."""
    with temporary_directory("mindllm_run_") as directory:
        path = directory / "run.yaml"
        path.write_text(text, encoding="utf-8")
        run_child([mode, "--config", str(path)], on_poll)


def run_child(arguments: Sequence[str], on_poll: Callable[[], None] = lambda: None) -> None:
    """Run ``mindllm`` with ``arguments`` in a child process, since MindSpore takes one device and one context per process.

    ``on_poll`` is called several times a second. An interrupt is passed on, so that training saves a checkpoint, and raised again
    when the child has ended.

    Raises:
        UserError, CheckFailed, RunFailed: the child ended with their exit code; the message is the child's.
    """
    with temporary_directory("mindllm_child_") as directory:
        command = [sys.executable, "-m", "mindllm", *arguments]
        process = JobProcess(arguments[0], command, {"PYTHONPATH": python_path()}, directory / "log")
        try:
            _wait(process, on_poll)
            on_poll()
            _raise_error(process)
        except KeyboardInterrupt:
            process.send(signal.SIGINT)
            _wait(process, lambda: None, time.monotonic() + INTERRUPT_SECONDS)
            raise
        finally:
            process.kill()


def _wait(process: JobProcess, on_poll: Callable[[], None], deadline: float | None = None) -> None:
    while process.poll() is None and (deadline is None or time.monotonic() < deadline):
        on_poll()
        time.sleep(POLL_SECONDS)


def _raise_error(process: JobProcess) -> None:
    """Raise the error with which a child ended, if any."""
    code = process.poll()
    if code == 0:
        return
    text = process.log.read_text(encoding="utf-8", errors="replace")
    message = text[text.rindex(ERROR) + len(ERROR) :].strip() if ERROR in text else ""
    kinds: dict[int | None, type[Exception]] = {kind.exit_code: kind for kind in (UserError, CheckFailed, RunFailed)}
    if message and code in kinds:
        raise kinds[code](message)
    raise RunFailed(f"mindllm {process.name} {process.ending()}\n{process.last_lines()}")
