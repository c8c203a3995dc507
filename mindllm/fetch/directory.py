"""Download of a model directory: whole or absent, each file verified, resumed after an interruption.

Files are written into a hidden directory next to the target, which is renamed to the target when all files are there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindllm.errors import RunFailed, UserError
from mindllm.fetch.hub import Hub
from mindllm.fetch.listing import INCOMPLETE, LOCK, Listing, RemoteFile
from mindllm.outside import open_file
from mindllm.terminal.progress import Progress, unwatched

PIECE = 4 << 20
RESERVED_SPACE = 100 << 20  # bytes of the disk


def fetch(hub: Hub, listing: Listing, directory: Path, progress: Progress = unwatched) -> Path:
    """Write the files of ``listing`` as ``directory``, except for those that an interrupted call has written already.

    Raises:
        UserError: the directory exists and is not empty, or another call is writing it.
        RunFailed: the disk is too small, the network fails, or a file is not the one that the hub lists.
    """
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UserError(f"{directory}: already exists; pass a different --output or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.with_name(f".{directory.name}.fetch")
    with _locked(unfinished):
        # remove what an earlier call wrote of another commit, and directories that are empty then
        listed = {unfinished / LOCK}
        for file in listing.files:
            listed |= {unfinished / file.name, _path(unfinished, file)}
        for path in sorted(unfinished.rglob("*"), reverse=True):  # entries before their directories
            if not path.is_dir() or path.is_symlink():
                if path not in listed:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
        done = {file.name for file in listing.files if not _problem(unfinished / file.name, file)}
        present = sum(file.size if file.name in done else _size(_path(unfinished, file)) for file in listing.files)
        _check_space(unfinished, listing.size - present)
        finished = sum(file.size for file in listing.files if file.name in done)
        for file in listing.files:
            if file.name not in done:
                for size in _fetch_file(hub, listing, file, unfinished):
                    progress("fetching", finished + size, listing.size)
                finished += file.size
            progress("fetching", finished, listing.size)
        if directory.is_dir():
            directory.rmdir()
        (unfinished / LOCK).unlink()
        unfinished.rename(directory)
    return directory


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Make and lock the directory of unfinished files, in which files are removed: one of this user, and no link."""
    directory.mkdir(exist_ok=True)
    if directory.is_symlink() or directory.lstat().st_uid != os.geteuid():
        raise UserError(f"{directory}: is a link, or belongs to another user; pass a different --output or remove it")
    with open(directory / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{directory}: another command is fetching into it") from None
        yield


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed + RESERVED_SPACE > free:
        raise RunFailed(
            f"{directory.parent}: not enough space: {needed / 1e9:.2f} GB to fetch, {free / 1e9:.2f} GB free; "
            "pass --output on another disk"
        )


def _path(directory: Path, file: RemoteFile) -> Path:
    """Return the path of an unfinished file. The digest is part of it: only the same content is resumed."""
    return directory / f"{file.name}.{file.digest[:16]}{INCOMPLETE}"


def _fetch_file(hub: Hub, listing: Listing, file: RemoteFile, directory: Path) -> Iterator[int]:
    """Write a file and verify it; yield its size after each piece."""
    path = _path(directory, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not file.digest or _size(path) > file.size:
        path.unlink(missing_ok=True)
    # All bytes are there if the earlier call was killed between the last one and the renaming.
    if not path.is_file() or _size(path) < file.size:
        with open(path, "ab", buffering=0) as content:
            for offset, piece in hub.download(listing, file, _size(path)) if file.size else ():
                yield offset
                # write a piece; drop what stands there from its offset on, which the hub sends again
                rest = memoryview(piece)
                try:
                    if offset < content.tell():
                        content.truncate(offset)
                    while rest:
                        rest = rest[content.write(rest) :]
                except OSError as error:
                    advice = "make room and run again to continue, or pass a different --output"
                    raise RunFailed(f"{path}: cannot be written: {error.strerror or error}; {advice}") from error
            os.fsync(content.fileno())
    if problem := _problem(path, file):
        path.unlink()
        raise RunFailed(f"{file.name} of {listing.repository}: {problem}; removed, run again to fetch it")
    path.replace(directory / file.name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _problem(path: Path, file: RemoteFile) -> str:
    """Return the difference of a file from the listed one in size or digest; empty if they agree."""
    size = _size(path)
    if size != file.size or not path.is_file():
        return f"has {size:,} bytes, expected {file.size:,}"
    if not file.digest:
        return ""
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with open_file(path) as content:
        while piece := content.read(PIECE):
            digest.update(piece)
    actual = digest.hexdigest()
    return "" if actual == file.digest else f"checksum {actual[:16]}… is not the hub's {file.digest[:16]}…: corrupted"
