"""A listening socket where anybody may knock: all who do are heard at once, and none for longer than a few seconds."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

PATIENCE_SECONDS = 10.0
MOST_GUESTS = 128  # who wait for what they will say; the longest waiting one makes room


class Guest(Protocol):
    """Who has connected and is not let in yet."""

    def fileno(self) -> int:
        """The descriptor of the connection."""

    def hear(self) -> bool:
        """Takes what has come; False: there is no more to be heard here, it was let in or is to be sent away."""

    def leave(self) -> None:
        """Closes the connection of one who was not let in."""


class Doorway:
    """Serves ``listener``; ``greet`` makes a guest of a connection and the address it comes from."""

    def __init__(self, listener: socket.socket, greet: Callable[[socket.socket, str], Guest]) -> None:
        self._listener, self._greet = listener, greet
        self._until: dict[Guest, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)

    def serve(self, seconds: float) -> None:
        """Hears whoever speaks within ``seconds``, once, and sends those away who were silent for too long."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif not key.data.hear():
                self._dismiss(key.data)
        for guest in [guest for guest, until in self._until.items() if time.monotonic() > until]:
            self._dismiss(guest)

    def serve_out(self, seconds: float) -> None:
        """Goes on while there are guests, ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        while self._until and (left := deadline - time.monotonic()) > 0:
            self.serve(left)

    def close(self) -> None:
        """Sends all away and stops listening."""
        for guest in list(self._until):
            self._dismiss(guest)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # gone again, or too many files are open: the next one may find room
            connection, address = self._listener.accept()
            connection.settimeout(PATIENCE_SECONDS)
            if len(self._until) >= MOST_GUESTS:
                self._dismiss(next(iter(self._until)))
            guest = self._greet(connection, str(address[0]))
            self._until[guest] = time.monotonic() + PATIENCE_SECONDS
            self._selector.register(guest, selectors.EVENT_READ, guest)

    def _dismiss(self, guest: Guest) -> None:
        del self._until[guest]
        self._selector.unregister(guest)
        guest.leave()
