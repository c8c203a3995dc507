"""One process of a job: its environment, its log, how it ended."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SHOWN_LINES, SHOWN_BYTES = 15, 8192  # of a log's end
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
libc = ctypes.CDLL(None, use_errno=True)


class JobProcess:
    """A process that dies with the launcher, in a session of its own: Ctrl-C in the terminal reaches the launcher alone."""

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
        """The exit code, negative the signal that killed it; None while it runs.

        It is looked at and stays a zombie until ``kill``, without the lock of ``Popen``: a second signal that is answered with
        KeyboardInterrupt while that one is taken would leave it taken, and who waits for the process then waits for ever.
        """
        if self.code is None:
            self.code = self._look(os.WNOHANG)
        return self.code

    def send(self, number: int) -> None:
        """Sends a signal to the process, not to what it has started."""
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Ends the process and everything it has started, at once."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.code is None:
            self.code = self._look(0)
        with suppress(ChildProcessError):  # an interrupt came after it
            os.waitpid(self.process.pid, 0)
        self.process.returncode = self.code

    def _look(self, options: int) -> int | None:
        """The exit code, without taking it from who asks next."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | options)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def ending(self) -> str:
        """How it ended, for people."""
        return ending(self.poll())

    def last_lines(self) -> str:
        """The end of its log."""
        return last_lines(self.log)


def ending(code: int | None) -> str:
    """An exit code, negative the signal that killed the process, for people."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def last_lines(log: Path) -> str:
    """Return the end of a log, indented; nothing where there is none."""
    if not log.is_file():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES))
        lines = file.read(SHOWN_BYTES).decode("utf-8", "replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:])


def die_with_parent() -> None:
    """Makes this process end when the one that started it does, however that ends."""
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
