"""The first node's view of another: its launcher, and its ranks as if they were processes of this machine."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindllm.jobs.process import ending
from mindllm.launch.heartbeat import Beat, beat_of
from mindllm.launch.lines import PIECE, SignedLine

LOST = 1  # exit code of ranks whose node is gone
KILL_SECONDS = 10.0
SEND_SECONDS = 60.0  # for which a node may take nothing of what it is sent
TAIL = 16384  # characters of a log's end
STOPS = (signal.SIGINT, signal.SIGTERM)


class Node:
    """Another node, with what its launcher has said of its ranks."""

    def __init__(self, line: SignedLine, number: int, ranks: list[int], host: str, log_dir: str) -> None:
        self.line, self.number, self.ranks, self.host, self.log_dir = line, number, ranks, host, log_dir
        self.gone = False
        self.seating = (
            False  # whether it has been given other ranks and has not said so yet: what it says is of the old ones
        )
        self.stop: int | None = None
        self.codes: dict[int, int] = {}
        self.tails: dict[int, str] = {}
        self.beats: dict[int, Beat] = {}
        self.said: list[tuple[int, bytes]] = []
        line.connection.settimeout(SEND_SECONDS)

    def begin(self, ranks: list[int], devices: int) -> None:
        """Gives it ``ranks`` of a job of so many, none to a spare; forgets what it has said of an earlier start."""
        self.ranks, self.seating = ranks, True
        self.line.send(seat=ranks, devices=devices)
        for known in (self.codes, self.tails, self.beats, self.said):
            known.clear()

    def receive(self) -> bool:
        """Takes note of what has come; False: its launcher is gone, or says what no launcher says."""
        return self.note(self.line.receive())

    def note(self, messages: Sequence[Mapping[str, Any]] | None) -> bool:
        """Takes note of messages (None: there will be no more); False as :meth:`receive`."""
        try:
            for message in messages or ():
                self._note(message)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            messages = None
        if messages is None:
            self.gone = True
            self.line.close()
        return not self.gone

    def take_said(self) -> list[tuple[int, bytes]]:
        """What ranks have said to the others since, in order: rank and content."""
        said, self.said = self.said, []
        return said

    def _note(self, message: Mapping[str, Any]) -> None:
        if "seated" in message:
            self.seating = self.seating and message["seated"] != self.ranks
        if "stop" in message:
            self.stop = int(STOPS[STOPS.index(message["stop"])])
        if self.seating:
            return
        if "said" in message:
            self.said.append((self._own(message["said"]), from_text(message["content"])))
        if "ended" in message:
            rank = self._own(message["ended"])
            self.codes[rank], self.tails[rank] = int(message["code"]), str(message["tail"])[:TAIL]
        if "beats" in message:
            now = time.monotonic()
            ages = {self._own(int(rank)): beat_of(beat) for rank, beat in message["beats"].items()}
            self.beats = {rank: age.seen(now - age.at) for rank, age in ages.items()}

    def _own(self, rank: Any) -> int:
        if rank not in self.ranks:
            raise ValueError(f"{rank} is no rank of node {self.number}")
        return int(rank)


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
        while self.poll() is None and (left := deadline - time.monotonic()) > 0:
            self.node.line.connection.settimeout(left)
            self.node.receive()
        if not self.node.gone:
            self.node.line.connection.settimeout(SEND_SECONDS)

    def ending(self) -> str:
        return "was lost with its node" if self.node.gone else ending(self.poll())

    def last_lines(self) -> str:
        return self.node.tails.get(self.rank, "")


class RemoteClient:
    """Where a rank on another node is answered; its node's launcher hands on what it says and hears."""

    def __init__(self, node: Node, rank: int) -> None:
        self.node, self.rank = node, rank

    def sendall(self, content: bytes) -> None:
        """Sends the rank an answer."""
        for start in range(0, len(content), PIECE):
            self.node.line.send(tell=self.rank, content=as_text(content[start : start + PIECE]))


def as_text(content: bytes) -> str:
    """Bytes as they stand in a message."""
    return base64.b64encode(content).decode()


def from_text(text: str) -> bytes:
    """The bytes that stand in a message; raises ValueError for other texts."""
    return base64.b64decode(text, validate=True)
