"""Names in a directory of checkpoints, and directories that are either complete or absent.

- ``{prefix}-{step}``: published and complete.
- ``{prefix}-{step}.superseded-{n}``: superseded when training continued from an earlier step; complete, of an abandoned run.
- ``.{name}.{purpose}-{token}``: being saved, replaced or deleted, possibly by a process that died. Readers ignore it.

A directory for other programs is filled under a hidden name, then renamed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindllm.errors import RunFailed, UserError, nearest
from mindllm.files import sync_directory
from mindllm.process.temporary import goes_with_this_process, remove_temporary, stays

NAME = re.compile(r"(?P<prefix>.+?)-(?P<step>\d+)(\.superseded-(?P<generation>\d+))?")
MOST_LISTED = 4
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<purpose>saving|replaced|deleting)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Entry:
    """A checkpoint by its name. ``generation`` numbers the abandoned run it belongs to; None: the current one."""

    path: Path
    prefix: str
    step: int
    generation: int | None

    @property
    def age(self) -> tuple[bool, int, int]:
        """A sort key, oldest first: superseded checkpoints before current ones, then by step."""
        return self.generation is None, self.generation or 0, self.step


def parse_entry(path: Path) -> Entry | None:
    """Return the checkpoint that ``path`` names, or None for any other name."""
    match = None if path.name.startswith(".") else NAME.fullmatch(path.name)
    if match is None:
        return None
    return Entry(path, match["prefix"], int(match["step"]), int(match["generation"]) if match["generation"] else None)


def entries(directory: Path) -> list[Entry]:
    """Return the checkpoints in ``directory``, oldest first; an empty list if the directory does not exist."""
    parsed = [parse_entry(path) for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    return sorted((entry for entry in parsed if entry), key=lambda entry: entry.age)


def suggest_checkpoints(path: Path) -> str:
    """Return ``"; there are …"`` with existing checkpoints for one that is missing, or an empty string.

    A similar step would be misleading, so the newest checkpoints are listed.
    """
    names = [entry.path.name for entry in entries(path.parent)]
    if not names or parse_entry(path) is None:
        return nearest(path.name, names)
    newest = names[-MOST_LISTED:]
    return f"; {'there is' if len(names) == 1 else 'there are'} {'…, ' * (len(names) > len(newest))}{', '.join(newest)}"


def hidden_path(path: Path, purpose: str) -> Path:
    """Return a new name next to ``path`` that readers ignore."""
    return path.with_name(f".{path.name}.{purpose}-{secrets.token_hex(4)}")


@dataclass(frozen=True)
class Leftover:
    """A hidden directory and the published path it belongs to."""

    path: Path
    published: Path
    purpose: str


def leftovers(directory: Path) -> list[Leftover]:
    """Return the hidden directories that interrupted processes left in ``directory``."""
    matches = [(path, HIDDEN.fullmatch(path.name)) for path in directory.iterdir()] if directory.is_dir() else []
    return [Leftover(path, path.with_name(match["name"]), match["purpose"]) for path, match in matches if match]


def refuse_existing(directory: Path) -> None:
    """Raise UserError for an existing file or a directory that is not empty."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        raise UserError(f"{directory}: exists already; pass another directory, or delete it")


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a new directory to fill, which becomes ``directory`` at the end of the block and is removed on failure.

    Raises:
        RunFailed: the disk is full or reports an error.
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
