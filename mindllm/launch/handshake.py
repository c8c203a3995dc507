"""How two launchers show each other that they know the secret of the job, without saying it.

Each draws a number for this connection and says it; what follows is signed with a key made of the secret and both numbers
(:class:`mindllm.launch.lines.SignedLine`), so what was heard on another connection is worth nothing. They take turns: numbers,
then a signed word from each, and only then the asking end says who it is.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from mindllm.launch.lines import LONGEST, Line, SignedLine

NONCE_DIGITS = 64
READY = {"ready": True}


class Answering:
    """The end that listens; a guest of a doorway. ``admit`` gets a signed line and what came first on it."""

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        admit: Callable[[SignedLine, list[dict[str, Any]]], None],
        refuse: Callable[[], None],
    ) -> None:
        self._plain, self._secret = Line(connection), secret
        self._signed: SignedLine | None = None
        self._admit, self._refuse = admit, refuse
        self._proven = self._admitted = False

    def fileno(self) -> int:
        return self._plain.fileno()

    def hear(self) -> bool:
        """See :class:`mindllm.launch.doorway.Guest`."""
        messages = (self._signed or self._plain).receive()
        if not messages:
            return messages is not None
        if self._signed is None:
            return len(messages) == 1 and self._answer(messages[0])
        if not self._proven:
            self._proven = messages == [READY]
            if self._proven:
                self._signed.send(**READY)
            return self._proven
        self._admitted = True
        self._signed.longest = LONGEST
        self._admit(self._signed, messages)
        return False

    def leave(self) -> None:
        """See :class:`mindllm.launch.doorway.Guest`."""
        if not self._admitted:
            self._plain.close()
            self._refuse()

    def _answer(self, message: Mapping[str, Any]) -> bool:
        asked, drawn = _nonce_in(message), _drawn()
        if asked is None:
            return False
        self._plain.send(nonce=drawn)
        self._signed = SignedLine(self._plain.connection, self._secret, (asked, drawn), asks=False)
        return True


def ask(connection: socket.socket, secret: bytes, seconds: float, go_on: Callable[[], None]) -> SignedLine | None:
    """The end that connects: a signed line to who knows ``secret``; None where he does not, or is silent for ``seconds``.

    ``go_on`` is called every now and then while nothing comes; what it raises ends the waiting.
    """
    plain, asked, deadline = Line(connection), _drawn(), time.monotonic() + seconds
    plain.send(nonce=asked)
    signed: SignedLine | None = None
    while (left := deadline - time.monotonic()) > 0:
        go_on()
        if not select.select([connection], [], [], min(left, 0.1))[0]:
            continue
        messages = (signed or plain).receive()
        if messages is None or len(messages) > 1:
            return None
        if messages and signed is not None:
            signed.longest = LONGEST
            return signed if messages[0] == READY else None
        if messages:
            if (answered := _nonce_in(messages[0])) is None:
                return None
            signed = SignedLine(connection, secret, (asked, answered), asks=True)
            signed.send(**READY)
    return None


def _drawn() -> str:
    return secrets.token_hex(NONCE_DIGITS // 2)


def _nonce_in(message: Mapping[str, Any]) -> str | None:
    value = message.get("nonce")
    good = isinstance(value, str) and len(value) == NONCE_DIGITS and value.isascii() and value.isalnum()
    return value if good else None
