"""One trainer in an output directory: a lock that ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import IO

from mindllm.errors import UserError

LOCK_NAME = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
logger = logging.getLogger(__name__)


class RunLock:
    """The lock on ``directory`` (flock(2) on a file in it), which says who holds it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            UserError: another process holds it, or the directory cannot be written to.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = open(self.directory / LOCK_NAME, "a+", encoding="utf-8")  # noqa: SIM115 (held until release)
        except OSError as error:
            raise UserError(
                f"{self.directory}: cannot be written to ({error.strerror}); give another --output_dir"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.directory} is in use: {_holder(file)}; give another --output_dir, or stop that run first"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            logger.warning("%s: its file system has no locks: nothing keeps a second run out", self.directory)
        file.truncate(0)
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Gives it back."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        content = json.loads(file.read())
        return f"process {content['pid']} on {content['host']} trains there"
    except (ValueError, KeyError, TypeError):
        return "another process trains there"
