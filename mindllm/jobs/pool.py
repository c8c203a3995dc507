"""Tasks in processes of this machine, several at a time, within the cores and the memory they are given."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindllm.jobs import worker
from mindllm.jobs.process import JobProcess
from mindllm.jobs.worker import CODE, LOG, MESSAGE_BYTES, POLL_SECONDS, TASK, TIMED_OUT
from mindllm.process.temporary import make_temporary, remove_temporary
from mindllm.sources import python_path

LOG_WIDTH = "1000"  # columns: messages are not wrapped


@dataclass(frozen=True)
class Task:
    """A call of ``module:function`` with JSON values as arguments.

    Attributes:
        name: subject of progress and messages, such as "stage 1".
        output: file that the function writes; its path becomes an additional last argument.
        memory: bytes that the task needs.
        slots: number of tasks that it counts for.
        directory: existing directory that receives its log; by default one of the pool.
        environment: variables that are set before the call.
        timeout: seconds after which it is killed.
    """

    name: str
    function: str
    arguments: tuple[Any, ...] = ()
    output: Path | None = None
    memory: int = 0
    slots: int = 1
    directory: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 3600.0


@dataclass(frozen=True)
class Outcome:
    """A task that has ended.

    Attributes:
        code: exit code, or minus the number of the signal that killed it; None if it took too long.
        log: file with everything it printed.
        alone: no other task ran at the same time.
        value: what the function returned on a cluster; functions of tasks on this machine write files.
    """

    task: Task
    code: int | None
    log: Path = Path(os.devnull)
    alone: bool = True
    value: Any = None


ProgressCallback = Callable[[Task, str, int, "int | None"], None]


def no_progress(task: Task, what: str, done: int, total: int | None) -> None:
    """Ignore the progress of tasks."""


class Pool:
    """Runs tasks in forks of a server process, in the order they are submitted. A context, at whose end all of them are killed.

    Args:
        slots: how many tasks run at a time.
        memory: bytes that the tasks may use together; None: unlimited. A single task always runs.
        preload: module that the server imports and prepares for all tasks (:mod:`mindllm.jobs.worker`).
        environment: variables of the server.
        on_progress: receives what tasks report.
    """

    def __init__(
        self,
        slots: int,
        memory: int | None = None,
        preload: str = "",
        environment: Mapping[str, str] | None = None,
        on_progress: ProgressCallback = no_progress,
    ) -> None:
        self._slots, self._memory, self._preload = slots, memory, preload
        self._environment, self._on_progress = environment or {}, on_progress
        self._waiting: list[Task] = []
        self._running: list[_Running] = []
        self._started = 0
        self._server: _Server | None = None
        self.directory = make_temporary("mindllm_pool_")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all tasks and remove the directory of the pool."""
        self._waiting.clear()
        self._running.clear()
        if self._server is not None:
            self._server.kill()
            self._server = None
        remove_temporary(self.directory)

    def submit(self, task: Task) -> None:
        """Add a task; it starts when :meth:`poll` is called and slots and memory are free."""
        self._waiting.append(task)

    @property
    def running(self) -> list[Task]:
        """Tasks that have started and not ended."""
        return [one.task for one in self._running]

    @property
    def left(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._waiting) + len(self._running)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcome of each task as it ends, until none is left."""
        while self.left:
            yield from self.poll()
            if self.left:
                self.wait()

    def wait(self) -> None:
        """Wait for a moment, in which tasks may end."""
        time.sleep(POLL_SECONDS)

    def poll(self) -> list[Outcome]:
        """Start tasks for which slots and memory are free, pass progress on, and return the tasks that have ended."""
        while self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting.pop(0))
        if self._server is None:
            return []
        tasks = {one.number: one.task for one in self._running}
        for number, what, done, total in self._server.messages():
            if task := tasks.get(int(number)):
                self._on_progress(task, what, done, total)
        server_code = self._server.process.poll()  # first: a task may write its code until then
        ended = [outcome for one in self._running if (outcome := one.outcome(self._server, server_code))]
        self._running = [one for one in self._running if not any(outcome.task is one.task for outcome in ended)]
        if server_code is not None:
            self._server.kill()
            self._server = None
        return ended

    def _fits(self, task: Task) -> bool:
        """Return True if a task may start: nothing else runs, or there are slots and memory for it."""
        used = sum(one.slots for one in self.running) + task.slots
        memory = sum(one.memory for one in self.running) + task.memory
        return not self._running or (used <= self._slots and (self._memory is None or memory <= self._memory))

    def _start(self, task: Task) -> None:
        if self._server is None:
            self._server = _Server(self.directory, self._preload, self._environment)
        self._started += 1
        directory = task.directory or self.directory / str(self._started)
        write_task(task, self._started, directory)
        self._server.start(directory)
        for one in self._running:
            one.alone = False
        self._running.append(_Running(task, self._started, directory, alone=not self._running))


@dataclass
class _Running:
    """A task in a fork of the server."""

    task: Task
    number: int
    directory: Path
    alone: bool

    def outcome(self, server: _Server, server_code: int | None) -> Outcome | None:
        """Return how the task has ended, if it has: by itself, or with its server."""
        if (self.directory / CODE).is_file():
            code = (self.directory / CODE).read_text(encoding="utf-8")
            return Outcome(self.task, None if code == TIMED_OUT else int(code), self.directory / LOG, self.alone)
        if server_code is not None:
            with (self.directory / LOG).open("ab") as log:
                log.write(server.process.log.read_bytes())
            return Outcome(self.task, server_code or 1, self.directory / LOG, self.alone)
        return None


class _Server:
    """The server process, seen from the pool. It dies with this process."""

    def __init__(self, directory: Path, preload: str, environment: Mapping[str, str]) -> None:
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        options = ["--connection", str(other.fileno()), "--preload", preload]
        variables = {"TMPDIR": str(directory), "COLUMNS": LOG_WIDTH, **environment}
        variables["PYTHONPATH"] = python_path({**os.environ, **environment})
        command = [sys.executable, "-m", "mindllm.jobs", *options]
        with other:
            self.process = JobProcess("the server of tasks", command, variables, directory / "server.log", other)

    def start(self, directory: Path) -> None:
        """Have the server run the task that a directory describes."""
        while self.process.poll() is None:
            with suppress(ConnectionError):  # the server has just ended
                try:
                    self._connection.send(os.fsencode(directory))
                    return
                except BlockingIOError:  # it still imports, and its queue is full
                    time.sleep(POLL_SECONDS)

    def messages(self) -> Iterator[tuple[str, str, int, int | None]]:
        """Yield the progress messages that have arrived."""
        with suppress(BlockingIOError, ConnectionError):
            while message := self._connection.recv(MESSAGE_BYTES):
                yield tuple(json.loads(message))

    def kill(self) -> None:
        """End the server and all its forks."""
        self._connection.close()
        self.process.kill()


def write_task(task: Task, number: int, directory: Path) -> None:
    """Describe a task in its directory, for the process that will run it."""
    directory.mkdir(exist_ok=True)
    (directory / CODE).unlink(missing_ok=True)
    content = {
        "number": number,
        "function": task.function,
        "arguments": [*task.arguments, *([str(task.output)] if task.output else [])],
        "environment": dict(task.environment),
        "timeout": task.timeout,
    }
    (directory / TASK).write_text(json.dumps(content), encoding="utf-8")


def run_task(task: Task, preload: str = "", environment: Mapping[str, str] | None = None) -> Outcome:
    """Run one task, which has a directory, in a process of its own: a fork of this one if it has imported ``preload``."""
    assert task.directory is not None
    if preload and worker.server is not None and worker.server.preload == preload:
        write_task(task, 0, task.directory)
        process, timeout = worker.start_task(task.directory)
        return Outcome(task, worker.wait_for(process, timeout), task.directory / LOG)
    with Pool(1, None, preload, environment) as pool:
        pool.submit(task)
        return next(pool.outcomes())
