"""The first node's view of the others: who has joined, and their ranks as if they were processes of this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindllm.errors import RunFailed, UserError
from mindllm.launch.heartbeat import Beat
from mindllm.launch.lines import Line
from mindllm.launch.process import ending

LOST = 1  # exit code of ranks whose node is gone
ANSWER_SECONDS = 60.0
KILL_SECONDS = 10.0


class Node:
    """Another node, with what its launcher has said of its ranks."""

    def __init__(self, line: Line, number: int, ranks: list[int], host: str, log_dir: str) -> None:
        self.line, self.number, self.ranks, self.host, self.log_dir = line, number, ranks, host, log_dir
        self.gone = False
        self.stop: int | None = None
        self.codes: dict[int, int] = {}
        self.tails: dict[int, str] = {}
        self.beats: dict[int, Beat] = {}

    def receive(self) -> bool:
        """Takes note of what has come; False: its launcher is gone."""
        messages = self.line.receive()
        if messages is None:
            self.gone = True
            return False
        for message in messages:
            if "ended" in message:
                self.codes[message["ended"]] = message["code"]
                self.tails[message["ended"]] = message["tail"]
            if "beats" in message:
                now = time.monotonic()
                self.beats = {
                    int(rank): Beat(**{**beat, "at": now - beat["at"]}) for rank, beat in message["beats"].items()
                }
            self.stop = message.get("stop", self.stop)
        return True


class RemoteProcess:
    """A rank on another node; the same methods as ``JobProcess``."""

    def __init__(self, node: Node, rank: int) -> None:
        self.node, self.rank = node, rank
        self.name = f"rank {rank} on {node.host}"
        self.log = Path(node.log_dir) / f"worker_{rank}.log"

    def poll(self) -> int | None:
        return self.node.codes.get(self.rank, LOST if self.node.gone else None)

    def send(self, number: int) -> None:
        self.node.line.send(signal=int(number), rank=self.rank)

    def kill(self) -> None:
        """Ends it, and waits until its node says so."""
        self.node.line.send(kill=self.rank)
        deadline = time.monotonic() + KILL_SECONDS
        self.node.line.connection.settimeout(KILL_SECONDS)
        while self.poll() is None and time.monotonic() < deadline and self.node.receive():
            pass
        self.node.line.connection.settimeout(None)

    def ending(self) -> str:
        return "was lost with its node" if self.node.gone else ending(self.poll())

    def last_lines(self) -> str:
        return self.node.tails.get(self.rank, "")


class Desk:
    """Where the launchers of other nodes join, on the port after MindSpore's; a context manager."""

    def __init__(self, host: str, port: int, workers: int, local: int, timeout: float) -> None:
        self.workers, self.local, self.timeout = workers, local, timeout
        self.host = host
        self.nodes: dict[int, Node] = {}
        self._seats: dict[int, socket.socket] = {}
        try:
            self._listener = socket.create_server((host, port + 1))
        except OSError as error:
            raise UserError(
                f"{host} port {port + 1} cannot be used ({error.strerror}); give another MASTER_PORT"
            ) from None

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self.nodes.values():
            node.line.send(finished=True)
            node.line.close()
        self._listener.close()

    def gather(self) -> None:
        """Waits until every node has joined.

        Raises:
            RunFailed: nodes that have not joined in time, or are gone already.
        """
        deadline, wanted = time.monotonic() + self.timeout, set(range(1, self.workers // self.local))
        while missing := sorted(wanted - {number for number, node in self.nodes.items() if not node.gone}):
            if not self._accept(deadline):
                raise RunFailed(
                    f"node {', '.join(map(str, missing))} did not join at {self.host} within {self.timeout:.0f} s; start the "
                    "same command there with its NODE_RANK"
                )
        for node in self.nodes.values():
            node.codes.clear()
            node.beats.clear()

    def start(self, rank: int, variables: Mapping[str, str]) -> tuple[RemoteProcess, socket.socket]:
        """Starts a rank on its node; returns it and the launcher's end of its seat."""
        node = self.nodes[rank // self.local]
        node.line.send(start=rank, variables=dict(variables))
        deadline = time.monotonic() + ANSWER_SECONDS
        while rank not in self._seats:
            if not self._accept(deadline):
                raise RunFailed(f"node {node.number} ({node.host}) has not started rank {rank}")
        return RemoteProcess(node, rank), self._seats.pop(rank)

    def _accept(self, deadline: float) -> bool:
        """Lets one launcher or rank in; False when the time is over."""
        self._listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return False
        connection.settimeout(ANSWER_SECONDS)
        line = Line(connection)
        hello: dict[str, Any] = line.receive_first() or {}
        connection.settimeout(None)
        if "seat" in hello:
            line.send(welcome=True)
            self._seats[hello["seat"]] = connection
        elif "node" in hello:
            if problem := self._misfit(hello):
                line.send(refused=problem)
                line.close()
            else:
                line.send(welcome=True)
                node = Node(line, hello["node"], hello["ranks"], hello["host"], hello["log_dir"])
                self.nodes[node.number] = node
        else:
            line.close()
        return True

    def _misfit(self, hello: Mapping[str, Any]) -> str:
        """Why a launcher cannot be one of this job's; empty where it can."""
        number = hello["node"]
        first = number * self.local
        if not 1 <= number < self.workers // self.local or hello["ranks"] != [*range(first, first + self.local)]:
            return (
                f"node 0 was started with {self.workers} workers, {self.local} on each node; NODE_RANK {number} was not"
            )
        if number in self.nodes and not self.nodes[number].gone:
            return f"NODE_RANK {number} has joined already, on {self.nodes[number].host}; each node needs its own"
        return ""
