"""Writes a model directory from a hub: whole or absent, each file checked, and after an interruption continued.

Files are written into a hidden directory beside the target, which becomes it when all are there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mindllm.errors import RunFailed, UserError
from mindllm.fetch.choice import RemoteFile
from mindllm.fetch.hub import Listing
from mindllm.outside import open_file
from mindllm.terminal.progress import Progress, unwatched

UNFINISHED = ".incomplete"
LOCK = ".lock"
PIECE = 4 << 20
LEFT_FREE = 100 << 20  # bytes of the disk


def fetch(listing: Listing, directory: Path, progress: Progress = unwatched) -> Path:
    """Write the files of ``listing`` as ``directory``; what an earlier call has written of them is not asked for again.

    Raises:
        UserError: the directory is there and not empty, or another call is writing it.
        RunFailed: the disk is too small, the network fails, or a file is not what the hub says it is.
    """
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UserError(f"{directory}: is there already; give another --output, or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    kept = directory.with_name(f".{directory.name}.fetch")
    kept.mkdir(exist_ok=True)
    with _alone(kept):
        _remove_others(kept, listing)
        whole = {
            file.name for file in listing.files if (kept / file.name).is_file() and not _problem(kept / file.name, file)
        }
        there = sum(_size(_place(kept, file)) for file in listing.files if file.name not in whole)
        there += sum(file.size for file in listing.files if file.name in whole)
        _refuse_if_full(kept, listing.size - there)
        done = sum(file.size for file in listing.files if file.name in whole)
        for file in listing.files:
            if file.name not in whole:
                _fetch_one(
                    listing, file, kept, lambda size, before=done: progress("fetching", before + size, listing.size)
                )
                done += file.size
            progress("fetching", done, listing.size)
        if directory.is_dir():
            directory.rmdir()
        (kept / LOCK).unlink()
        kept.rename(directory)
    return directory


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with open(directory / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{directory}: another command is fetching into it") from None
        yield


def _remove_others(kept: Path, listing: Listing) -> None:
    """Remove what an earlier call wrote of another commit."""
    wanted = {LOCK, *(file.name for file in listing.files)}
    wanted |= {_place(kept, file).relative_to(kept).as_posix() for file in listing.files}
    for path in kept.rglob("*"):
        if not path.is_dir() and path.relative_to(kept).as_posix() not in wanted:
            path.unlink()


def _refuse_if_full(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed + LEFT_FREE > free:
        raise RunFailed(
            f"{directory.parent}: {needed / 1e9:.2f} GB are to be fetched and {free / 1e9:.2f} GB are free; "
            "give --output elsewhere"
        )


def _place(kept: Path, file: RemoteFile) -> Path:
    """Where a file is written until it is whole: its content's own place, so that nothing else is ever continued there."""
    return kept / f"{file.name}.{(file.sha256 or file.blob)[:16]}{UNFINISHED}"


def _fetch_one(listing: Listing, file: RemoteFile, kept: Path, done: Any) -> None:
    unfinished = _place(kept, file)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if (
        not file.sha256 or _size(unfinished) > file.size
    ):  # small ones come compressed, which has no places to continue from
        unfinished.unlink(missing_ok=True)
    with open(unfinished, "ab", buffering=0) as content:
        done(content.tell())
        if content.tell() < file.size:  # it may have been stopped between the last byte and its name
            counted: Any = _Counted(content, unfinished, done)
            listing.hub.transfer(listing, file, counted)
            with _told(unfinished):
                os.fsync(content.fileno())
    if problem := _problem(unfinished, file):
        unfinished.unlink()
        raise RunFailed(f"{file.name} of {listing.repository}: {problem}; it is removed, fetch again")
    unfinished.replace(kept / file.name)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of the disk as what they are: what a hub's client raises of them would be taken for the network's."""
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"{path}: cannot be written: {error.strerror or error}; make room and run again to continue, or give --output "
            "elsewhere"
        ) from error


class _Counted:
    """A file that tells how long it is, and what is wrong with its disk."""

    def __init__(self, file: IO[bytes], path: Path, done: Any) -> None:
        self.file, self.path, self.done = file, path, done

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        with _told(self.path):
            while view:
                view = view[self.file.write(view) :]
        self.done(self.file.tell())
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _problem(path: Path, file: RemoteFile) -> str:
    """What is wrong with a file, by size and checksum; nothing where it is what the hub has."""
    size = _size(path)
    if size != file.size:
        return f"has {size:,} bytes, the hub's {file.size:,}"
    if not file.sha256 and not file.blob:
        return ""
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with open_file(path) as content:
        while piece := content.read(PIECE):
            digest.update(piece)
    found, wanted = digest.hexdigest(), file.sha256 or file.blob
    return "" if found == wanted else f"its checksum is {found[:16]}…, the hub's {wanted[:16]}…: it is corrupted"
