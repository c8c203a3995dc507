"""A job of several ranks on this machine: started, watched and ended together."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from mindllm.command import INTERRUPTED
from mindllm.errors import RunFailed
from mindllm.jobs.process import JobProcess
from mindllm.launch.desk import RendezvousServer
from mindllm.launch.heartbeat import (
    DIRECTORY,
    DUMP_SIGNAL,
    Beat,
    describe_hang,
    forget_beats,
    hanging,
    last_steps,
    read_beats,
)
from mindllm.launch.layouts import LayoutBook
from mindllm.launch.meeting import DESCRIPTOR, Table
from mindllm.launch.nodes import Node, RemoteClient, RemoteProcess
from mindllm.launch.signals import StopRequests

HOST = "127.0.0.1"
JOB = "MINDLLM_JOB"  # environment variable: a name of the job, the same each time it is started again
POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0  # after a rank has failed, for others that fail of the same cause to say so
LOOK_SECONDS = 1.0  # between two looks for ranks that hang
DUMP_SECONDS = 0.5  # for a rank that hangs to write where
LINGER_SECONDS = 30.0  # ranks meet when they have finished, so the last one to end is not far
STOPPED = (
    0,
    INTERRUPTED,
    128 + signal.SIGTERM,
    -signal.SIGINT,
    -signal.SIGTERM,
)  # endings of a rank that was asked to stop


class JobFailed(RunFailed):
    """The job has failed, with the exit code of the rank that failed first."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class JobStopped(JobFailed):
    """The job was asked to stop before there was anything to save."""


class CrashedAtStart(JobFailed):
    """A rank has crashed before the first step was done: in the native code that connects them."""


class Job:
    """Runs ``command`` as ``workers`` ranks, with a scheduler of MindSpore where there are several; a context manager.

    Whatever ends the block ends all processes; ``show`` is given what rank 0 writes. SIGINT and SIGTERM are handed on to the
    ranks, which agree on the step they stop after; a second one kills them. What ``go_on`` raises, which is called while other
    nodes are waited for, ends that.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        port: int,
        log_dir: Path,
        timeout: int,
        variables: Mapping[str, str] | None = None,
        desk: RendezvousServer | None = None,
        show: Callable[[bytes], None] = lambda written: None,
        first_device: int = 0,
        book: LayoutBook | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        host = HOST if desk is None else desk.host
        self.command, self.book = command, book
        self.may_go_on = go_on
        self.log_dir = log_dir
        self.variables: dict[str, str] = {
            "MS_SCHED_HOST": host,
            "MS_SCHED_PORT": str(port),
            "MS_WORKER_IP": host,  # or MindSpore's workers listen on an address of the network
            "MS_TOPO_TIMEOUT": str(timeout),
            "MS_RETRY_INTERVAL_LOWER": "1",  # seconds between attempts to reach the scheduler; else up to 5
            "MS_RETRY_INTERVAL_UPPER": "1",
            "MS_DISABLE_HEARTBEAT": "1",  # or a machine that stands still for a while is taken for the death of a rank
            DIRECTORY: str(log_dir),
            **(variables or {}),
        }
        self.count = workers
        self.first_device = first_device
        self.desk = desk
        self.local = workers if desk is None else desk.local
        self.ranks: list[JobProcess | RemoteProcess] = []
        self.scheduler: JobProcess | None = None
        self.stopped_by: int | None = None
        self.first_end: float | None = None
        self.show = show
        self.next_look = 0.0
        self.shown: IO[bytes] | None = None
        self.selector = selectors.DefaultSelector()

    def __enter__(self) -> Job:
        self.requests = StopRequests(self._stop)
        self.requests.install()
        try:
            self._begin()
            self.shown = open(self.ranks[0].log, "rb")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        """Starts the ranks, of several nodes when all of them are there."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        forget_beats(self.log_dir, range(self.local))
        if self.desk is not None:
            self._seat(self.desk.gather(self._go_on))
        self.variables |= {"MS_WORKER_NUM": str(self.count), "RANK_SIZE": str(self.count)}
        if self.count > 1:
            command = [sys.executable, "-m", "mindllm.launch.scheduler"]
            variables = {**self.variables, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
            self.scheduler = JobProcess("the scheduler", command, variables, self.log_dir / "scheduler.log")
        for node in self._nodes():
            self.selector.register(node.line, selectors.EVENT_READ, partial(self._hear, node))
        self.table = Table([self._start(rank) for rank in range(self.count)])
        for rank, connection in enumerate(self.table.connections[: self.local]):
            assert isinstance(connection, socket.socket)
            self.selector.register(connection, selectors.EVENT_READ, partial(self.table.receive, rank))
        self._hand_on()  # a signal that came while ranks were being started

    def __exit__(self, *exception: object) -> None:
        for process in self._all():
            process.kill()
        if self.shown is not None:
            self._show()
            self.shown.close()
        self.requests.restore()

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

    def _seat(self, ranks: int) -> None:
        """Takes the layout for the nodes that are there."""
        self.count = ranks
        if self.book is not None:
            self.command = self.book.command(self.command, ranks)

    def _go_on(self) -> None:
        if self.stopped_by is not None:
            raise JobStopped("stopped before all nodes had joined: nothing is saved", 128 + self.stopped_by)
        self.may_go_on()

    def _hear(self, node: Node) -> bool:
        """Takes what another node's launcher says, and what its ranks say to the others; False: it is gone."""
        alive = node.receive()
        for rank, piece in node.take_said():
            self.table.take(rank, piece)
        return alive

    def _start(self, rank: int) -> socket.socket | RemoteClient:
        """Starts a rank; returns the launcher's way to it."""
        variables = {**self.variables, "RANK_ID": str(rank), "DEVICE_ID": str(self.first_device + rank)}
        if self.count > 1:
            variables |= {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)}
        if self.desk is not None and rank >= self.local:
            process, seat = self.desk.start(rank, variables)
            self.ranks.append(process)
            return seat
        here, there = socket.socketpair()
        variables[DESCRIPTOR] = str(there.fileno())
        log = self.log_dir / f"worker_{rank}.log"
        self.ranks.append(JobProcess(f"rank {rank}", [sys.executable, *self.command], variables, log, there))
        there.close()
        return here

    def _running(self) -> bool:
        return any(rank.poll() is None for rank in self.ranks)

    def _nodes(self) -> list[Node]:
        return list(self.desk.nodes.values()) if self.desk is not None else []

    def _all(self) -> list[JobProcess | RemoteProcess]:
        return [*self.ranks, *([self.scheduler] if self.scheduler else [])]

    def _meet(self) -> None:
        """Serves the meeting of the ranks for a moment."""
        deadline = time.monotonic() + POLL_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if not self.selector.get_map():
                time.sleep(left)
            for key, _ in self.selector.select(left):
                if not key.data():
                    self.selector.unregister(key.fileobj)
        for node in self._nodes():
            if node.stop is not None and self.stopped_by is None:
                self.stopped_by = node.stop
                self._hand_on()

    def _show(self) -> None:
        """Shows what rank 0 has written since."""
        assert self.shown is not None
        self.show(self.shown.read())

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
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self._look_for_hanging_ranks()

    def _look_for_hanging_ranks(self) -> None:
        """Ends the job when a rank has given no sign of life for too long; its log tells where it hangs."""
        now, running = time.monotonic(), [rank for rank, process in enumerate(self.ranks) if process.poll() is None]
        beats = {rank: beat for rank, beat in self._beats().items() if rank in running}
        if not (found := hanging(beats, self.table.waiting(), now)):
            return
        for rank in found:
            self.ranks[rank].send(DUMP_SIGNAL)
        time.sleep(DUMP_SECONDS)
        first = self.ranks[found[0]]
        told = f"{describe_hang(beats, found, now)}; the job was ended; {self._last_steps()}. Its log: {first.log}"
        raise JobFailed(f"{told}\n{first.last_lines()}", 1)

    def _has_trained(self) -> bool:
        """Whether a step has been done: what ranks say of it, or, of ranks that say nothing, that they have added numbers."""
        beats = self._beats()
        return any(beat.trained for beat in beats.values()) if beats else self.table.used

    def _beats(self) -> dict[int, Beat]:
        beats = read_beats(self.log_dir, range(self.local))
        for node in self._nodes():
            beats |= node.beats
        return beats

    def _last_steps(self) -> str:
        return last_steps(self._beats())

    def _is_good(self, code: int | None) -> bool:
        """Whether a rank ended as it should: it has finished, or was asked to stop and has done so."""
        return code == 0 or (code == INTERRUPTED and self.stopped_by is not None)

    def _fail(self, first: JobProcess | RemoteProcess) -> None:
        """Waits a moment for ranks that fail of the same cause, then says which one was the first."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and self._running():
            self._meet()
        if not self._running() and all(self._is_good(rank.poll()) for rank in self.ranks):
            return
        if self.stopped_by is not None and first.poll() in STOPPED:
            raise JobStopped("stopped before the first step: nothing is saved", 128 + self.stopped_by)
        culprit = next(rank for rank in [*self.ranks, first] if rank.poll() == first.poll())
        self._show()
        steps = self._last_steps()
        told = f"{culprit.name} {culprit.ending()}; the job was ended{'; ' if steps else ''}{steps}. Its log: {culprit.log}"
        shown = culprit is self.ranks[0]
        crashed = culprit.poll() == -signal.SIGSEGV and not self._has_trained()
        failure = CrashedAtStart if crashed else JobFailed
        raise failure(told if shown else f"{told}\n{culprit.last_lines()}", max(culprit.poll() or 1, 1))

    def _stop(self, number: int) -> None:
        self.stopped_by = number
        os.write(2, b"stopping after the step in progress; a second signal ends the job at once\n")
        self._hand_on()

    def _hand_on(self) -> None:
        """Tells the ranks of this node, with which the others agree: a signal that came later to another node would find
        ranks there that have stopped and are about to end.
        """
        for rank in self.ranks[: self.local]:
            if self.stopped_by is not None:
                rank.send(self.stopped_by)
