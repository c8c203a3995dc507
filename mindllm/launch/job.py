"""A job of several ranks on this machine: started, watched and ended together."""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from mindllm.command import INTERRUPTED
from mindllm.console import visible
from mindllm.errors import RunFailed
from mindllm.launch.meeting import DESCRIPTOR, Table
from mindllm.launch.process import JobProcess

HOST = "127.0.0.1"
POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0  # after a rank has failed, for others that fail of the same cause to say so
LINGER_SECONDS = 30.0  # ranks meet when they have finished, so the last one to end is not far
STOPPED = (0, INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)  # endings of a rank that was asked to stop
SIGNALS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


class JobFailed(RunFailed):
    """The job has failed, with the exit code of the rank that failed first."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CrashedAtStart(JobFailed):
    """A rank has crashed before the first step was done: in the native code that connects them."""


class Job:
    """Runs ``command`` as ``workers`` ranks, with a scheduler of MindSpore where there are several; a context manager.

    Whatever ends the block ends all processes. SIGINT and SIGTERM are handed on to the ranks, which agree on the step they
    stop after; a second one kills them.
    """

    def __init__(self, command: Sequence[str], workers: int, port: int, log_dir: Path, timeout: int) -> None:
        self.command = command
        self.log_dir = log_dir
        self.variables = {
            "MS_WORKER_NUM": str(workers),
            "MS_SCHED_HOST": HOST,
            "MS_SCHED_PORT": str(port),
            "MS_WORKER_IP": HOST,  # or MindSpore's workers listen on an address of the network
            "MS_TOPO_TIMEOUT": str(timeout),
            "MS_RETRY_INTERVAL_LOWER": "1",  # seconds between attempts to reach the scheduler; else up to 5
            "MS_RETRY_INTERVAL_UPPER": "1",
            "MS_DISABLE_HEARTBEAT": "1",  # or a machine that stands still for a while is taken for the death of a rank
            "RANK_SIZE": str(workers),
        }
        self.count = workers
        self.ranks: list[JobProcess] = []
        self.scheduler: JobProcess | None = None
        self.stopped_by: int | None = None
        self.first_end: float | None = None
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.selector = selectors.DefaultSelector()

    def __enter__(self) -> Job:
        self.previous = {number: signal.signal(number, self._stop) for number in SIGNALS}
        self.log_dir.mkdir(parents=True, exist_ok=True)
        if self.count > 1:
            command = [sys.executable, "-m", "mindllm.launch.scheduler"]
            variables = {**self.variables, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
            self.scheduler = JobProcess("the scheduler", command, variables, self.log_dir / "scheduler.log")
        self.table = Table([self._start(rank) for rank in range(self.count)])
        for rank, connection in enumerate(self.table.connections):
            self.selector.register(connection, selectors.EVENT_READ, rank)
        self._hand_on()  # a signal that came while ranks were being started
        self.shown = open(self.ranks[0].log, "rb")
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._all():
            process.kill()
        self._show()
        self.shown.close()
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Waits for the end of all ranks; returns the exit code of the job.

        Raises:
            JobFailed: a rank, or the scheduler, has failed.
        """
        while self._running():
            self._meet()
            self._show()
            self._check()
        self._check()
        return 0 if self.stopped_by in (None, signal.SIGTERM) else INTERRUPTED

    def _start(self, rank: int) -> socket.socket:
        """Starts a rank; returns the launcher's end of its socket."""
        here, there = socket.socketpair()
        variables = {**self.variables, "RANK_ID": str(rank), "DEVICE_ID": str(rank), DESCRIPTOR: str(there.fileno())}
        if self.count > 1:
            variables |= {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)}
        log = self.log_dir / f"worker_{rank}.log"
        self.ranks.append(JobProcess(f"rank {rank}", [sys.executable, *self.command], variables, log, there))
        there.close()
        return here

    def _running(self) -> bool:
        return any(rank.poll() is None for rank in self.ranks)

    def _all(self) -> list[JobProcess]:
        return [*self.ranks, *([self.scheduler] if self.scheduler else [])]

    def _meet(self) -> None:
        """Serves the meeting of the ranks for a moment."""
        deadline = time.monotonic() + POLL_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if not self.selector.get_map():
                time.sleep(left)
            for key, _ in self.selector.select(left):
                if not self.table.receive(key.data):
                    self.selector.unregister(key.fileobj)

    def _show(self) -> None:
        """Prints what rank 0 has written since; a terminal is shown control characters instead of obeying them."""
        written = self.shown.read()
        if sys.stdout.isatty():
            written = visible(self.decoder.decode(written)).encode()
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()

    def _check(self) -> None:
        """Ends the job when it cannot go on."""
        ended = {rank: rank.poll() for rank in self.ranks if rank.poll() is not None}
        if failed := [rank for rank, code in ended.items() if not self._is_good(code)]:
            self._fail(failed[0])
        if self.scheduler and self.scheduler.poll() and not ended:
            self._fail(self.scheduler)
        if ended and self._running():
            self.first_end = self.first_end or time.monotonic()
            if self.table.waiting() or time.monotonic() - self.first_end > LINGER_SECONDS:
                self._fail(next(iter(ended)))

    def _is_good(self, code: int | None) -> bool:
        """Whether a rank ended as it should: it has finished, or was asked to stop and has done so."""
        return code == 0 or (code == INTERRUPTED and self.stopped_by is not None)

    def _fail(self, first: JobProcess) -> None:
        """Waits a moment for ranks that fail of the same cause, then says which one was the first."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and self._running():
            time.sleep(POLL_SECONDS)
        if not self._running() and all(self._is_good(rank.poll()) for rank in self.ranks):
            return
        if self.stopped_by is not None and first.poll() in STOPPED:
            raise JobFailed("stopped before the first step: nothing is saved", 128 + self.stopped_by)
        culprit = next(rank for rank in [*self.ranks, first] if rank.poll() == first.poll())
        self._show()
        told = f"{culprit.name} {culprit.ending()}; the job was ended. Its log: {culprit.log}"
        shown = culprit is self.ranks[0]
        crashed = culprit.poll() == -signal.SIGSEGV and not self.table.used
        failure = CrashedAtStart if crashed else JobFailed
        raise failure(told if shown else f"{told}\n{culprit.last_lines()}", max(culprit.poll() or 1, 1))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            raise KeyboardInterrupt
        self.stopped_by = SIGNALS[signal.Signals(number)]
        os.write(2, b"stopping after the step in progress; a second signal ends the job at once\n")
        self._hand_on()

    def _hand_on(self) -> None:
        for rank in self.ranks:
            if self.stopped_by is not None:
                rank.send(self.stopped_by)
