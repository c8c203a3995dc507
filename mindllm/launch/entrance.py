"""Where launchers of other nodes are let in: a port of the first node, and the secret of the job that they know."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindllm.errors import UserError
from mindllm.launch.doorway import Doorway
from mindllm.launch.handshake import Answering
from mindllm.launch.lines import SignedLine
from mindllm.launch.secret import Secret

BACKLOG = 128  # connections that wait to be heard
MOST_STRANGERS = 8  # addresses that are told
Admit = Callable[[SignedLine, Sequence[Mapping[str, Any]]], None]


class Entrance:
    """Lets in who knows the job's ``secret``, all who ask at once.

    ``admit`` gets a signed line and what came first on it; ``told`` a line for people where somebody was sent away.
    """

    def __init__(self, address: tuple[str, int], secret: Secret, admit: Admit, told: Callable[[str], None]) -> None:
        self.host, self.port = address
        self._secret, self._told = secret, told
        self._strangers: set[str] = set()
        listener, drawn = self._open()
        self.doorway = Doorway(
            listener, lambda connection, address: Answering(connection, drawn, admit, lambda: self._told_of(address))
        )

    def _open(self) -> tuple[socket.socket, bytes]:
        """The listening port, and the secret, which is drawn when the port is ours, or another job's would be lost.

        Nobody is heard before: a node that reached the port before the secret is written would be sent away.
        """
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.host, self.port))
                drawn = self._secret.draw()
                listener.listen(BACKLOG)
            except OSError as error:
                raise UserError(
                    f"{self.host} port {self.port} cannot be used ({error.strerror}); give another one (MASTER_PORT, --port)"
                ) from None
        except BaseException:
            listener.close()
            raise
        return listener, drawn

    def serve(self, seconds: float) -> None:
        """Hears whoever speaks within ``seconds``, once."""
        self.doorway.serve(seconds)

    def close(self) -> None:
        """Sends all away who were not let in, stops listening and forgets the secret."""
        self.doorway.close()
        self._secret.forget()

    def strangers_told(self) -> str:
        """Return who came without the secret, as the end of a sentence; empty where nobody did."""
        if not self._strangers:
            return ""
        return (
            f". From {', '.join(sorted(self._strangers))} somebody came without the secret in {self._secret.path}: where that is "
            f"a node of this job, {self._secret.called} must be one directory that both see"
        )

    def _told_of(self, address: str) -> None:
        """Says once of an address that who speaks from there does not know the secret."""
        if address not in self._strangers and len(self._strangers) < MOST_STRANGERS:
            self._strangers.add(address)
            self._told(
                f"sent away: {address} on port {self.port} has not shown that it knows the secret in {self._secret.path}"
            )
