"""Where the processes of a job wait for each other and add numbers: one socket from the launcher to each of them.

It is beside MindSpore because collective operators of its CPU back end give up after 30 seconds (2.10), whatever the reason
another process is late for: compiling, saving a checkpoint. Here a process waits as long as the others live, which the
launcher sees to. The sums are in double precision, in the order of ranks.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from mindllm.errors import RunFailed

DESCRIPTOR = "MINDLLM_MEETING"  # environment variable: the file descriptor of a worker's end
HEADER = struct.Struct("=I")
NUMBER_SIZE = 8
MOST_NUMBERS = 1 << 20  # that ranks add at once


class RendezvousClient:
    """A worker's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @staticmethod
    def is_inherited() -> bool:
        """Whether a launcher has started this process."""
        return DESCRIPTOR in os.environ

    @staticmethod
    def inherited() -> RendezvousClient | None:
        """The seat the launcher has given this process; None where it was started by something else."""
        descriptor = os.environ.get(DESCRIPTOR)
        return RendezvousClient(socket.socket(fileno=int(descriptor))) if descriptor else None

    def sum(self, values: Sequence[float]) -> list[float]:
        """Waits until every rank has called this with as many values; returns the sums over ranks.

        Raises:
            RunFailed: the launcher is gone.
        """
        with suppress(BrokenPipeError):  # then there is nothing to receive, either
            self.connection.sendall(pack(values))
        (count,) = HEADER.unpack(self._receive(HEADER.size))
        return list(struct.unpack(f"={count}d", self._receive(count * NUMBER_SIZE)))

    def _receive(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            piece = self.connection.recv(size - len(content))
            if not piece:
                raise RunFailed("the launcher of this job is gone, and other ranks cannot be reached without it")
            content += piece
        return content


class Answered(Protocol):
    """The launcher's way to a rank: its socket, or what hands on to another node."""

    def sendall(self, content: bytes, /) -> None:
        """Sends the rank an answer."""


class Table:
    """The launcher's end: takes what ranks send, and answers all of them once the last one has come."""

    def __init__(self, connections: Sequence[Answered]) -> None:
        self.connections = list(connections)
        self.used = False  # whether the ranks have added numbers: from their first step on, not when they only met
        self._received = [b"" for _ in connections]

    def receive(self, rank: int) -> bool:
        """Takes what has arrived from ``rank`` on its socket; call it when that is readable. False: the rank has left.

        Raises:
            RunFailed: see :meth:`take`.
        """
        connection = self.connections[rank]
        assert isinstance(connection, socket.socket)
        try:
            piece = connection.recv(1 << 16)
        except ConnectionResetError:
            return False
        self.take(rank, piece)
        return bool(piece)

    def take(self, rank: int, piece: bytes) -> None:
        """Takes a piece of what ``rank`` says.

        Raises:
            RunFailed: ranks have come with different numbers of values: they do not run the same program. Or one says what no
                rank says.
        """
        self._received[rank] += piece
        if len(self._received[rank]) > HEADER.size + MOST_NUMBERS * NUMBER_SIZE:
            raise RunFailed(f"rank {rank} sends more than {MOST_NUMBERS} numbers, which no rank adds at once")
        values = [unpack(content) for content in self._received]
        complete = [value for value in values if value is not None]
        if len(complete) == len(values):
            self._answer(complete)

    def _answer(self, values: Sequence[tuple[float, ...]]) -> None:
        counts = [len(value) for value in values]
        if len(set(counts)) > 1:
            raise RunFailed(f"the ranks have gone different ways: they add {counts} numbers")
        self.used |= max(counts) > 0
        answer = pack([sum(numbers) for numbers in zip(*values, strict=True)])
        self._received = [b"" for _ in self.connections]
        for connection in self.connections:
            with suppress(OSError):  # a rank that has died meanwhile
                connection.sendall(answer)

    def waiting(self) -> list[int]:
        """Ranks that wait for others."""
        return [rank for rank, content in enumerate(self._received) if content]


def pack(values: Sequence[float]) -> bytes:
    """The number of values, then the values, as doubles."""
    return HEADER.pack(len(values)) + struct.pack(f"={len(values)}d", *values)


def unpack(content: bytes) -> tuple[float, ...] | None:
    """The values of a whole message; None while a part of it is on its way."""
    if len(content) < HEADER.size:
        return None
    (count,) = HEADER.unpack_from(content)
    if count > MOST_NUMBERS:
        raise RunFailed(f"a rank announces {count} numbers to add; {MOST_NUMBERS} are the most")
    if len(content) < HEADER.size + count * NUMBER_SIZE:
        return None
    return struct.unpack_from(f"={count}d", content, HEADER.size)
