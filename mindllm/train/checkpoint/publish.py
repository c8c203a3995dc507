"""The steps in which a checkpoint comes and goes on the disk, each safe against a crash after it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from mindllm.files import sync_directory
from mindllm.train.checkpoint.manifest import FileEntry
from mindllm.train.checkpoint.names import hidden_path
from mindllm.train.checkpoint.tensors import HashingWriter


def write_file(path: Path, role: str, write: Callable[[HashingWriter], None]) -> FileEntry:
    """Has ``write`` write a new file, flushed to the disk; returns its entry in the manifest."""
    with open(path, "xb") as file:
        writer = HashingWriter(file)
        write(writer)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, role, writer.size, writer.sha256)


def publish(temporary: Path, final: Path) -> None:
    """Renames ``temporary`` to ``final`` durably. A predecessor steps aside under a name that ``recover`` puts back."""
    replaced = hidden_path(final, "replaced")
    try:
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
    except BaseException:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def delete(path: Path) -> None:
    """Deletes a checkpoint so that it is either whole or no longer visible, whenever the process or the machine stops."""
    doomed = path.rename(hidden_path(path, "deleting"))
    sync_directory(path.parent)  # before the first file goes: a lost rename would leave a checkpoint with holes
    shutil.rmtree(doomed)


def make_directory(directory: Path) -> None:
    """Creates ``directory`` with its parents; each new name is on the disk before anything is announced inside."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)
