"""What the launchers of a job know and nobody else: a file in the directory that all nodes share, which only their user reads.

The first node's launcher draws it anew for each start, so a file that a job has left behind opens nothing.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from mindllm.errors import UserError

BYTES = 32
OTHERS = 0o077  # bits of a mode that let others read


class SecretMissing(Exception):
    """There is no secret to read; the message says why, and what to do."""


class Secret:
    """The secret of the job whose first node listens on ``port``, in ``directory``, which people have given as ``called``."""

    def __init__(self, directory: Path, port: int, called: str = "output_dir") -> None:
        self.path, self.called = directory / f".launch-secret-{port}", called

    def draw(self) -> bytes:
        """Draws a new one and writes it for the others.

        Raises:
            UserError: the file cannot be written, or others could read it.
        """
        drawn = secrets.token_bytes(BYTES)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f"{self.path.name}.", dir=self.path.parent)  # mode 600
            with open(handle, "w", encoding="ascii") as file:
                file.write(drawn.hex())
                file.flush()
                os.fsync(handle)
                mode = os.fstat(handle).st_mode
            Path(name).replace(self.path)
        except OSError as error:
            raise UserError(f"{self.path}: the secret of the nodes cannot be written: {error.strerror}") from None
        if mode & OTHERS:
            self.forget()
            raise UserError(
                f"{self.path}: the secret of the nodes is open to others (mode {mode & 0o777:o}, whatever is asked for); "
                f"{self.called} must be on a file system that keeps modes"
            )
        return drawn

    def read(self) -> bytes:
        """Reads the one that the first node has drawn; raises SecretMissing."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SecretMissing(
                f"{self.path} is not there; node 0 writes it: {self.called} must be one directory that all nodes share"
            ) from None
        except OSError as error:
            raise SecretMissing(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode) or state.st_mode & OTHERS:
                raise SecretMissing(f"{self.path} is not a file of mode 600; remove it")
            if state.st_uid != os.geteuid() and state.st_uid != self._owner_here():
                raise SecretMissing(f"{self.path} is user {state.st_uid}'s; start all nodes as the same user")
            content = os.read(handle, 4 * BYTES)
        finally:
            os.close(handle)
        with suppress(ValueError):
            if len(found := bytes.fromhex(content.decode("ascii"))) == BYTES:
                return found
        raise SecretMissing(f"{self.path} holds no secret; remove it, and start node 0 again")

    def forget(self) -> None:
        """Removes the file."""
        with suppress(OSError):
            self.path.unlink()

    def _owner_here(self) -> int:
        """Whose a file becomes that this process makes there: a network file system may have another name for root."""
        with suppress(OSError), tempfile.TemporaryFile(dir=self.path.parent) as file:
            return os.fstat(file.fileno()).st_uid
        return os.geteuid()
