"""Messages between launchers of several nodes: one JSON object a line over a TCP connection."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any


class Line:
    """One end. Sending to an end that is gone is not an error: receiving tells it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; waits for something to come. None: the other end is gone."""
        try:
            piece = self.connection.recv(1 << 16)
        except (ConnectionError, TimeoutError):
            return None
        if not piece:
            return None
        *lines, self._received = (self._received + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_first(self) -> dict[str, Any] | None:
        """The first message, which no other follows until it is answered; None where the other end is gone or says nonsense."""
        with suppress(ValueError):
            while (messages := self.receive()) is not None:
                if messages:
                    return messages[0]
        return None

    def close(self) -> None:
        self.connection.close()
