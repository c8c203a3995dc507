"""The launcher of a node other than the first: starts, stops and reports on its ranks as the first node's launcher says.

It takes orders from nobody else, and few from that one: to start its own command with variables it knows by name, and signals.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindllm.command import INTERRUPTED
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.process import JobProcess
from mindllm.launch.desk import VARIABLES
from mindllm.launch.heartbeat import DIRECTORY, DUMP_SIGNAL, forget_beats, read_beats
from mindllm.launch.job import LOOK_SECONDS, POLL_SECONDS, JobStopped
from mindllm.launch.joining import join
from mindllm.launch.layouts import LayoutBook
from mindllm.launch.lines import PIECE, SignedLine
from mindllm.launch.meeting import DESCRIPTOR
from mindllm.launch.nodes import SEND_SECONDS, STOPS, TAIL, as_text, from_text
from mindllm.launch.secret import Secret
from mindllm.launch.signals import StopRequests

SENT = (*STOPS, DUMP_SIGNAL)  # signals that ranks get


class Agent:
    """Serves the job at ``address`` with this node's ``ranks``; a context manager that leaves no process behind.

    ``told`` is given a line for people while the job is waited for. ``go_on`` is called then; what it raises ends the waiting.
    """

    def __init__(
        self,
        command: Sequence[str],
        address: tuple[str, int],
        node: int,
        ranks: range,
        log_dir: Path,
        timeout: float,
        secret: Secret,
        told: Callable[[str], None] = lambda text: None,
        first_device: int = 0,
        book: LayoutBook | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        self.first_device, self._may_go_on = first_device, go_on
        self.command, self.address, self.node, self.ranks = command, address, node, ranks
        self.book, self._count = book, len(ranks)
        self.log_dir, self.timeout, self.secret = log_dir, timeout, secret
        self.processes: dict[int, JobProcess] = {}
        self.seats: dict[int, socket.socket] = {}
        self.stopped_by: int | None = None
        self._told: set[int] = set()
        self._say = told
        self._next_look = 0.0

    def __enter__(self) -> Agent:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.requests = StopRequests(self._stop)
        self.requests.install()
        try:
            self.line = self._join()
        except BaseException:
            self.requests.restore()
            raise
        self.line.connection.settimeout(SEND_SECONDS)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
        self.line.close()
        self.requests.restore()

    def serve(self) -> int:
        """Does what the first node says until it says that the job has finished; returns the exit code.

        Raises:
            RunFailed: the first node's launcher is gone.
        """
        while True:
            ends: list[SignedLine | socket.socket] = [self.line, *self.seats.values()]
            readable = select.select(ends, [], [], POLL_SECONDS)[0]
            for rank in [rank for rank, seat in self.seats.items() if seat in readable]:
                self._hand_on(rank)
            if self.line in readable and self._obey_all(self.line.receive()):
                return self._exit_code()
            self._report()

    def _join(self) -> SignedLine:
        """Connects to the first node, which may be started later than this one."""
        own = {"ranks": [*self.ranks], "host": socket.gethostname(), "log_dir": str(self.log_dir)}
        return join(self.address, self.secret, self.timeout, {"node": self.node, **own}, self._say, self._go_on)

    def _go_on(self) -> None:
        if self.stopped_by is not None:
            raise JobStopped("stopped before the job was joined", 128 + self.stopped_by)
        self._may_go_on()

    def _obey_all(self, messages: list[dict[str, Any]] | None) -> bool:
        """Does what the first node says; whether that is that the job has finished."""
        if messages is None:
            raise RunFailed("the launcher of node 0 is gone, or the job has failed; its output says why")
        try:
            for message in messages:
                if "finished" in message:
                    return True
                self._obey(message)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFailed(f"node 0 says what no launcher says ({type(error).__name__}: {error})") from None
        return False

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "seat" in message:
            self._take_seat([int(rank) for rank in message["seat"]], int(message["devices"]))
        elif "start" in message:
            self._start(self.ranks[self.ranks.index(message["start"])], message["variables"])
        elif "refused" in message:
            raise UserError(str(message["refused"]))
        elif "tell" in message:
            if seat := self.seats.get(message["tell"]):
                with suppress(OSError):  # a rank that has died meanwhile
                    seat.sendall(from_text(message["content"]))
        elif "signal" in message:
            self.processes[message["rank"]].send(SENT[SENT.index(message["signal"])])
        elif "kill" in message:
            self.processes[message["kill"]].kill()

    def _take_seat(self, ranks: list[int], devices: int) -> None:
        """Takes the ranks of a start, none as a spare, of a job of so many devices, and its layout where there is a book."""
        if len(ranks) not in (0, self._count) or not 0 <= sum(ranks[:1]) <= devices - len(ranks):
            raise ValueError(f"ranks {ranks} of {devices}")
        self.ranks = range(ranks[0], ranks[0] + self._count) if ranks else range(0)
        if self.book is not None:
            self.command = self.book.command(self.command, devices)
        for rank in [*self.seats]:
            self._forget_seat(rank)
        self.processes.clear()
        self._told.clear()
        self.line.send(seated=[*self.ranks])

    def _start(self, rank: int, variables: Mapping[str, str]) -> None:
        """Starts a rank; what it says to the other ones and hears from them goes through here."""
        forget_beats(self.log_dir, [rank])
        self._told.discard(rank)
        self._forget_seat(rank)
        self.seats[rank], of_rank = socket.socketpair()
        own = {
            DIRECTORY: str(self.log_dir),
            DESCRIPTOR: str(of_rank.fileno()),
            "MS_WORKER_IP": self.line.connection.getsockname()[0],
            "DEVICE_ID": str(self.first_device + rank - self.ranks.start),
        }
        known = {name: str(variables[name]) for name in VARIABLES & variables.keys()}
        log = self.log_dir / f"worker_{rank}.log"
        command = [sys.executable, *self.command]
        self.processes[rank] = JobProcess(f"rank {rank}", command, {**known, **own}, log, of_rank)
        of_rank.close()

    def _hand_on(self, rank: int) -> None:
        """Takes what a rank says to the others to the first node."""
        try:
            piece = self.seats[rank].recv(PIECE)
        except OSError:
            piece = b""
        if piece:
            self.line.send(said=rank, content=as_text(piece))
        else:
            self._forget_seat(rank)

    def _forget_seat(self, rank: int) -> None:
        if seat := self.seats.pop(rank, None):
            seat.close()

    def _report(self) -> None:
        for rank, process in self.processes.items():
            if rank not in self._told and (code := process.poll()) is not None:
                self._told.add(rank)
                self.line.send(ended=rank, code=code, tail=process.last_lines()[-TAIL:])
        if time.monotonic() >= self._next_look:
            self._next_look = (now := time.monotonic()) + LOOK_SECONDS
            beats = read_beats(self.log_dir, self.processes)
            ages = {rank: {**asdict(beat), "at": now - beat.at} for rank, beat in beats.items()}
            self.line.send(beats=ages)

    def _exit_code(self) -> int:
        codes = [process.poll() or 0 for process in self.processes.values()]
        if any(code not in (0, INTERRUPTED) for code in codes):
            raise RunFailed("the job has failed; the output of node 0 says why")
        return INTERRUPTED if INTERRUPTED in codes or self.stopped_by == signal.SIGINT else 0

    def _stop(self, number: int) -> None:
        self.stopped_by = number
        os.write(
            2, b"stopping the whole job after the step in progress; a second signal ends this node's ranks at once\n"
        )
        if hasattr(self, "line"):
            self.line.send(stop=int(number))
