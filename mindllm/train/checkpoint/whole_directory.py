"""Directories for other programs that are either whole or absent: filled under a hidden name, then renamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindllm.errors import RunFailed, UserError
from mindllm.files import sync_directory
from mindllm.process.temporary import goes_with_this_process, remove_temporary, stays
from mindllm.train.checkpoint.names import hidden_path


def refuse_existing(directory: Path) -> None:
    """Raises a UserError for a directory that holds something, or a file."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        raise UserError(f"{directory}: exists already; give a directory that does not, or delete it")


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yields a new directory to fill, which becomes ``directory`` at the end of the block; nothing is left of it on failure.

    Raises:
        RunFailed: the disk is full or refuses.
    """
    temporary = hidden_path(directory, "saving")
    try:
        temporary.mkdir(parents=True)
        goes_with_this_process(temporary)
        yield temporary
        sync_directory(temporary)
        stays(temporary)
        temporary.rename(directory)
        sync_directory(directory.parent)
    except OSError as error:
        raise RunFailed(f"{directory} was not written: {error.strerror or error}. Nothing of it is left") from error
    finally:
        remove_temporary(temporary)
