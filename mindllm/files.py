"""Files that are either whole or absent: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mindllm.process.temporary import goes_with_this_process, stays

SIZE_PATTERN = r"^[1-9]\d*(\.\d+)?(KB|MB|GB)$"
SHELLS_OWN = re.compile(r"^~(?=/|$)|\$\w+|\$\{\w+\}")
LONGEST_NAME = 200  # of the 255 bytes Linux allows; names of unfinished files are longer than the final ones
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk, or of what a user may have of it
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def size_in_bytes(text: str) -> int:
    """Reads a size such as ``5GB`` (:data:`SIZE_PATTERN`; decimal units); raises ValueError for any other text."""
    if not re.match(SIZE_PATTERN, text):
        raise ValueError(f"{text} is not a size such as 5GB or 200MB")
    return int(float(text[:-2]) * UNITS[text[-2:]])


def size_text(size: int) -> str:
    """Return a size in bytes as :func:`size_in_bytes` reads it, exactly."""
    unit = next((unit for unit in ("GB", "MB") if size % UNITS[unit] == 0), "KB")
    whole, rest = divmod(size, UNITS[unit])
    return f"{whole}.{rest:03d}{unit}" if rest else f"{whole}{unit}"


def unexpanded(path: Path | str) -> str:
    """``"; …"`` for a path that begins with ``~`` or names a variable, which a shell expands and no YAML does; else empty."""
    found = SHELLS_OWN.search(str(path))
    return f"; {found[0]} is not expanded in a YAML: write the path itself" if found else ""


def sync_directory(directory: Path) -> None:
    """Makes renames inside ``directory`` durable (POSIX: the directory entry is flushed by syncing the directory)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def obstacle(path: Path | str, directory: bool = False) -> str:
    """Why no file (or directory) can be written at ``path``, before any work is done for it; empty where one can.

    Nothing is made. What only writing shows, such as a full disk, is not seen.
    """
    path = Path(path)
    if "\0" in str(path):
        return "is no path: it holds a null character"
    try:
        if directory and path.exists() and not path.is_dir():
            return "is a file, not a directory"
        if not directory and path.is_dir():
            return "is a directory; give the name of a file"
        existing = path if path.is_dir() else path.absolute().parent
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            return f"{existing} is a file, not a directory"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} cannot be written to"
        if longest := next((part for part in path.parts if len(os.fsencode(part)) > LONGEST_NAME), ""):
            return f"{longest[:20]}… is longer than the {LONGEST_NAME} bytes a name may have"
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Has the error of a full disk name ``path``: it is met by a write, which knows no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            error.filename = str(path)
        raise


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path beside ``path``; on success it is synced and renamed to ``path``, on failure it is removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    goes_with_this_process(temporary)
    try:
        with naming(path):
            yield temporary
            _finish(temporary, path)
    finally:
        stays(temporary)
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_open(path: Path | str, mode: str = "w") -> Iterator[IO]:
    """Opens a temporary file for writing that becomes ``path`` when the block ends without an error."""
    encoding = None if "b" in mode else "utf-8"
    with atomic_path(path) as temporary, open(temporary, mode, encoding=encoding) as file:
        yield file
        file.flush()


def _finish(temporary: Path, path: Path) -> None:
    temporary.chmod(0o666 & ~_umask())
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
