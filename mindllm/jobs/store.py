"""Results that are stored between runs: whole or absent, found by key, within bounds.

Several processes may use a store at the same time: an entry is written under another name and renamed, and an entry that another
process has removed is only missing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mindllm.cache import user_cache
from mindllm.errors import UserError
from mindllm.process.temporary import goes_with_this_process, remove_temporary

DAMAGED = (UserError, ValueError, KeyError, TypeError, EOFError)
ABANDONED_SECONDS = 86400.0  # after which an unfinished entry belongs to no living process
Value = TypeVar("Value")


@dataclass(frozen=True)
class Store:
    """Entries in one directory, each a file or a directory. Those not used for longest are removed first.

    Attributes:
        place: a namespace in the user's cache, or a directory.
        prefix: start of the names of all entries; others in the same directory are left alone.
        max_entries: bound on their number.
        max_bytes: bound on their size.
    """

    place: str | Path
    prefix: str = ""
    max_entries: int | None = None
    max_bytes: int | None = None

    @property
    def directory(self) -> Path:
        """The directory of the entries."""
        return self.place if isinstance(self.place, Path) else user_cache(*self.place.split("/")).absolute()

    def path(self, key: str) -> Path:
        """Return the file or directory of an entry, which need not exist."""
        return self.directory / f"{self.prefix}{key}"

    def get(
        self, key: str, make: Callable[[], Value], read: Callable[[Path], Value], write: Callable[[Value, Path], None]
    ) -> Value:
        """Return the value of a file; if it is missing or damaged, make and store it."""
        value = self.read(key, read)
        if value is None:
            value = make()
            with self.writing(key) as path:
                write(value, path)
        return value

    def read(self, key: str, read: Callable[[Path], Value]) -> Value | None:
        """Return the value of a file, or None if it is missing or damaged; a damaged file is removed."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            value = read(path)
        except OSError:
            return None
        except DAMAGED:
            path.unlink(missing_ok=True)
            return None
        _touch(path)
        return value

    @contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        """Yield a new file that becomes the entry when the block ends without an error."""
        path = self.path(key)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        goes_with_this_process(unfinished)
        try:
            yield unfinished
            unfinished.replace(path)
            self.trim(path)
        finally:
            unfinished.unlink(missing_ok=True)
            remove_temporary(unfinished)

    @contextmanager
    def open_directory(self, key: str) -> Iterator[Path]:
        """Yield the directory of an entry, or a new one that becomes it when the block ends without an error."""
        path = self.path(key)
        if path.is_dir():
            yield path
            _touch(path)
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.mkdir(parents=True, exist_ok=True)
        goes_with_this_process(unfinished)
        try:
            yield unfinished
            with suppress(OSError):  # another process was faster
                unfinished.rename(path)
            self.trim(path)
        finally:
            remove_temporary(unfinished)

    def trim(self, used: Path | None = None) -> None:
        """Remove the entries that exceed the bounds, but not ``used``, and unfinished ones that a killed process has left."""
        paths = [path for path in self.directory.glob(f"{self.prefix}*") if not path.name.startswith(".")]
        entries = sorted((path for path in paths if path != used), key=_last_use, reverse=True)
        count, size = int(used is not None), _size(used) if used and self.max_bytes else 0
        for path in entries:
            count, size = count + 1, size + (_size(path) if self.max_bytes else 0)
            exceeds_entries = self.max_entries is not None and count > self.max_entries
            if exceeds_entries or (self.max_bytes is not None and size > self.max_bytes):
                _remove(path)
        for path in self.directory.glob(f".{self.prefix}*"):
            if time.time() - _last_use(path) > ABANDONED_SECONDS:
                _remove(path)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a directory."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
    return 0


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _touch(path: Path) -> None:
    with suppress(OSError):  # it may be read-only, or removed by another process
        os.utime(path)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0
