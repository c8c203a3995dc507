"""The process whose forks run tasks: ``python -m mindllm.jobs --connection 5``, started by a :class:`Pool`.

It imports the module ``--preload`` once for all tasks, and calls ``prepare()`` of it if there is one; ``learn(directory)`` after
each task. A fork has what the server has imported, and reads it from the same memory. The server must not use MindSpore, whose
threads would not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mindllm.command import CommandParser, run_command
from mindllm.files import atomic_open
from mindllm.jobs.environment import leave_job
from mindllm.jobs.process import die_with_parent
from mindllm.process.exit_hooks import skip_exit_functions

TASK, LOG, CODE = "task.json", "task.log", "task.code"
POLL_SECONDS = 0.05
MESSAGE_BYTES = 1 << 16
PROGRESS_SECONDS = 0.2  # between two messages of a task
TIMED_OUT = "timeout"  # in place of an exit code


@dataclass(frozen=True)
class Server:
    """The server that this process is, or is forked from: what it has imported, and its connection to the pool."""

    preload: str
    connection: socket.socket


server: Server | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tasks until the connection ends."""
    parser = CommandParser(
        prog="python -m mindllm.jobs",
        description="Runs tasks in forks of this process, as another process requests them.",
        epilog="example: python -m mindllm.jobs --connection 5 --preload mindllm.compiled.rank.compile_rank",
    )
    parser.add_argument(
        "--connection", type=int, required=True, help="file descriptor of a socket that brings requests"
    )
    parser.add_argument(
        "--preload", default="", help="module to import first; prepare() and learn(directory) of it are called"
    )
    options = parser.parse_args(arguments)
    preload = importlib.import_module(options.preload) if options.preload else None
    if preload and hasattr(preload, "prepare"):
        preload.prepare()
    gc.freeze()  # forks need not search what lives as long as they do
    global server
    with socket.socket(fileno=options.connection) as connection:
        server = Server(options.preload, connection)
        _serve(connection, preload)
    skip_exit_functions()
    return 0


@dataclass
class _Fork:
    directory: Path
    deadline: float
    timed_out: bool = False


def _serve(connection: socket.socket, preload: ModuleType | None) -> None:
    """Fork a process for each directory that is received, and write the exit codes of those that have ended."""
    connection.settimeout(POLL_SECONDS)
    running: dict[int, _Fork] = {}
    while True:
        with suppress(TimeoutError):
            message = connection.recv(MESSAGE_BYTES)
            if not message:
                return
            directory = Path(os.fsdecode(message))
            process, timeout = start_task(directory)
            running[process] = _Fork(directory, time.monotonic() + timeout)
        for process, one in running.items():
            if time.monotonic() > one.deadline and not one.timed_out:
                one.timed_out = True
                os.kill(process, signal.SIGKILL)
        while running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            one = running.pop(process)
            with atomic_open(one.directory / CODE) as file:
                file.write(TIMED_OUT if one.timed_out else str(os.waitstatus_to_exitcode(status)))
            if preload and hasattr(preload, "learn"):
                preload.learn(one.directory)


def start_task(directory: Path) -> tuple[int, float]:
    """Fork the process of the task that a directory describes; return its id and the seconds it may take."""
    task = json.loads((directory / TASK).read_text(encoding="utf-8"))
    return fork(partial(_run, task, directory), directory / LOG, task["environment"]), task["timeout"]


def _run(task: Mapping[str, Any], directory: Path) -> None:
    """Call the function of a task, in its fork."""
    global report_progress, task_directory
    if task_directory is None:  # not within another task
        task_directory, report_progress = directory, _Progress(task["number"])
    module, _, name = task["function"].partition(":")
    getattr(importlib.import_module(module), name)(*task["arguments"])


class _Progress:
    """Sends the progress of a task to the pool, at most several times a second; messages that nobody reads are dropped."""

    def __init__(self, number: int) -> None:
        self._number, self._last = number, 0.0

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        now = time.monotonic()
        if server is not None and (now - self._last >= PROGRESS_SECONDS or total is None):
            self._last = now
            message = json.dumps([self._number, what, done, total]).encode()
            with suppress(OSError):
                server.connection.send(message, socket.MSG_DONTWAIT)


def no_progress(what: str, done: int = 0, total: int | None = None) -> None:
    """Do nothing: this process runs no task."""


report_progress: Callable[..., None] = no_progress
"""Reports how far the task of this process is: what it does, how many are done, of how many."""
task_directory: Path | None = None
"""The directory of the task that this process runs."""


def fork(main: Callable[[], None], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Return the id of a fork that runs ``main``, writes into ``log``, and ends with this process at the latest."""
    process = os.fork()
    if process:
        return process
    try:
        die_with_parent()
        redirect_output(log)
        leave_job()
        os.environ.update(environment or {})
        run_command(lambda _: main())
    finally:  # never back into the caller's code
        os._exit(1)


def redirect_output(log: Path) -> None:
    """Append what this process prints to ``log``."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def wait_for(process: int, timeout: float) -> int | None:
    """Return the exit code of a fork, or minus the number of the signal that killed it; None if it was killed at ``timeout``."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None
