"""The launcher of a node other than the first: starts, stops and reports on its ranks as the first node's launcher says."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindllm.command import INTERRUPTED
from mindllm.errors import RunFailed, UserError
from mindllm.launch.heartbeat import DIRECTORY, forget_beats, read_beats
from mindllm.launch.job import LOOK_SECONDS, POLL_SECONDS
from mindllm.launch.lines import Line
from mindllm.launch.meeting import DESCRIPTOR
from mindllm.launch.process import JobProcess
from mindllm.launch.signals import StopRequests


class Agent:
    """Serves the job at ``address`` with this node's ``ranks``; a context manager that leaves no process behind."""

    def __init__(
        self, command: Sequence[str], address: tuple[str, int], node: int, ranks: range, log_dir: Path, timeout: float
    ) -> None:
        self.command, self.address, self.node, self.ranks = command, address, node, ranks
        self.log_dir, self.timeout = log_dir, timeout
        self.processes: dict[int, JobProcess] = {}
        self.stopped_by: int | None = None
        self._told: set[int] = set()
        self._next_look = 0.0

    def __enter__(self) -> Agent:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.requests = StopRequests(self._stop)
        self.requests.install()
        self.line = self._join()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
        self.requests.restore()

    def serve(self) -> int:
        """Does what the first node says until it says that the job has finished; returns the exit code.

        Raises:
            RunFailed: the first node's launcher is gone.
        """
        while True:
            if select.select([self.line], [], [], POLL_SECONDS)[0]:
                messages = self.line.receive()
                if messages is None:
                    raise RunFailed("the launcher of node 0 is gone, or the job has failed; its output says why")
                for message in messages:
                    if "finished" in message:
                        return self._exit_code()
                    self._obey(message)
            self._report()

    def _join(self) -> Line:
        """Connects to the first node, which may be started later than this one."""
        deadline = time.monotonic() + self.timeout
        while True:
            line = self._connect(deadline)
            names = {"host": socket.gethostname(), "log_dir": str(self.log_dir)}
            line.send(node=self.node, ranks=[*self.ranks], **names)
            answer = line.receive_first()
            if answer is None:
                continue
            if "refused" in answer:
                raise UserError(answer["refused"])
            return line

    def _connect(self, deadline: float) -> Line:
        while self.stopped_by is None:
            try:
                return Line(socket.create_connection(self.address, timeout=None))
            except OSError as error:
                if time.monotonic() > deadline:
                    host, port = self.address
                    raise RunFailed(
                        f"node 0 does not answer at {host} port {port} within {self.timeout:.0f} s: {error}"
                    ) from None
                time.sleep(POLL_SECONDS)
        raise RunFailed("stopped before the job was joined")

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "start" in message:
            self._start(message["start"], message["variables"])
        elif "signal" in message:
            self.processes[message["rank"]].send(message["signal"])
        elif "kill" in message:
            self.processes[message["kill"]].kill()

    def _start(self, rank: int, variables: Mapping[str, str]) -> None:
        """Starts a rank with a seat of its own at the first node's launcher."""
        forget_beats(self.log_dir, [rank])
        self._told.discard(rank)
        seat = self._connect(time.monotonic() + self.timeout)
        seat.send(seat=rank)
        seat.receive_first()
        own = {
            DIRECTORY: str(self.log_dir),
            DESCRIPTOR: str(seat.fileno()),
            "MS_WORKER_IP": self.line.connection.getsockname()[0],
            "DEVICE_ID": str(rank - self.ranks.start),
        }
        log = self.log_dir / f"worker_{rank}.log"
        command = [sys.executable, *self.command]
        self.processes[rank] = JobProcess(f"rank {rank}", command, {**variables, **own}, log, seat.connection)
        seat.close()

    def _report(self) -> None:
        for rank, process in self.processes.items():
            if rank not in self._told and (code := process.poll()) is not None:
                self._told.add(rank)
                self.line.send(ended=rank, code=code, tail=process.last_lines())
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
