"""Messages between launchers of several nodes: one JSON object a line over a TCP connection, of bounded length.

Lines can be signed: both ends then know a secret, of which each line is an HMAC (RFC 2104) with the numbers that both have drawn
for this connection, the direction, and its place in it. So nothing can be forged, said again, left out or sent back.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import time
from contextlib import suppress
from typing import Any

from mindllm.outside import parse_json

FIRST = 8192  # bytes of a line from who has not shown yet that he belongs here
LONGEST = 1 << 22  # bytes of any other line
PIECE = 1 << 16
LAST_SECONDS = 5.0  # for the other end to have heard the last message
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""Seconds and tries after which the other end is taken to be gone: a machine without power says nothing of it."""


class Line:
    """One end. Sending to one that is gone is no error: receiving tells it. One that says nonsense is as good as gone."""

    def __init__(self, connection: socket.socket, longest: int = FIRST) -> None:
        self.connection = connection
        self.longest = longest
        self._received = b""
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message."""
        try:
            self.connection.sendall(self.encoded(json.dumps(message).encode()) + b"\n")
        except OSError:  # half a message may be on its way: nothing can follow it
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; waits for something to come. None: the other end is gone, or says nonsense."""
        try:
            piece = self.connection.recv(PIECE)
        except OSError:
            return None
        if not piece:
            return None
        *lines, self._received = (self._received + piece).split(b"\n")
        if max(map(len, [*lines, self._received])) > self.longest:
            return None
        try:
            messages = [parse_json(self.decoded(line)) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def receive_first(self, seconds: float) -> dict[str, Any] | None:
        """The first message, which no other follows until it is answered; None where it does not come within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.connection.settimeout(left)
            if (messages := self.receive()) is None:
                return None
            if messages:
                return messages[0]
        return None

    def send_last(self, **message: Any) -> None:
        """Sends a message that none follows; :meth:`close_heard` closes the line then."""
        self.send(**message)
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close_heard(self, seconds: float = LAST_SECONDS) -> None:
        """Closes the line when the other end has closed its own, or after ``seconds``.

        What it still says is taken and forgotten: a connection closed with something unread is reset, and where the other end
        was just sending, a message it has not read yet is lost to it.
        """
        deadline = time.monotonic() + seconds
        with suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not self.connection.recv(PIECE):
                    break
        self.close()

    def close(self) -> None:
        self.connection.close()

    def encoded(self, content: bytes) -> bytes:
        """The line that says ``content``."""
        return content

    def decoded(self, line: bytes) -> bytes:
        """What a line says; raises ValueError where it is none of the other end's."""
        return line


class SignedLine(Line):
    """An end that knows ``secret``, of a connection for which ``nonces`` were drawn: that of who asked, of who answered."""

    def __init__(self, connection: socket.socket, secret: bytes, nonces: tuple[str, str], asks: bool) -> None:
        super().__init__(connection)
        keys = [_digest(secret, f"{direction} {' '.join(nonces)}".encode()) for direction in ("asks", "answers")]
        self._own_key, self._other_key = keys if asks else reversed(keys)
        self._sent = self._heard = 0

    def encoded(self, content: bytes) -> bytes:
        self._sent += 1
        return _signature(self._own_key, self._sent, content) + b" " + content

    def decoded(self, line: bytes) -> bytes:
        self._heard += 1
        signature, _, content = line.partition(b" ")
        if not hmac.compare_digest(signature, _signature(self._other_key, self._heard, content)):
            raise ValueError("not signed with the secret of this connection")
        return content


def _signature(key: bytes, place: int, content: bytes) -> bytes:
    return _digest(key, b"%d " % place + content).hex().encode()


def _digest(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, hashlib.sha256)
