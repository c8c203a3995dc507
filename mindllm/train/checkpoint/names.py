"""Names inside a directory of checkpoints.

- ``{prefix}-{step}``: announced and whole.
- ``{prefix}-{step}.superseded-{n}``: set aside when training went on from an earlier step; whole, but of an abandoned run.
- ``.{name}.{purpose}-{token}``: being saved, replaced or deleted, or was when its process died. No reader looks at it.

Directories for other programs are either whole or absent: filled under a hidden name, then renamed.
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
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<purpose>saving|replaced|deleting)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Entry:
    """A checkpoint as its name tells it. ``generation`` counts the settings-aside up to its own; ``None``: it is current."""

    path: Path
    prefix: str
    step: int
    generation: int | None

    @property
    def age(self) -> tuple[bool, int, int]:
        """Sorts oldest first: those set aside before the current ones, then by step."""
        return self.generation is None, self.generation or 0, self.step


def entry_of(path: Path) -> Entry | None:
    """Returns what the name of ``path`` says, or ``None`` when it is not the name of a checkpoint."""
    match = None if path.name.startswith(".") else NAME.fullmatch(path.name)
    if match is None:
        return None
    return Entry(path, match["prefix"], int(match["step"]), int(match["generation"]) if match["generation"] else None)


def entries(directory: Path) -> list[Entry]:
    """Returns the checkpoints in ``directory``, oldest first; none when there is no such directory."""
    found = [entry_of(path) for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    return sorted((entry for entry in found if entry), key=lambda entry: entry.age)


MOST_TOLD = 4  # checkpoints


def beside_missing(path: Path) -> str:
    """Returns what to give in place of a checkpoint that is not there; ``"; there are …"``, and empty where there is none.

    A step is never taken for another one that looks like it: of those that are there the newest are named.
    """
    others = [entry.path.name for entry in entries(path.parent)]
    if not others or entry_of(path) is None:
        return nearest(path.name, others)
    told = others[-MOST_TOLD:]
    return f"; {'there is' if len(others) == 1 else 'there are'} {'…, ' * (len(others) > len(told))}{', '.join(told)}"


def hidden_path(path: Path, purpose: str) -> Path:
    """Returns a fresh name beside ``path`` that no reader takes for a checkpoint."""
    return path.with_name(f".{path.name}.{purpose}-{secrets.token_hex(4)}")


@dataclass(frozen=True)
class Leftover:
    """A hidden directory and the announced path it belongs to."""

    path: Path
    announced: Path
    purpose: str


def leftovers(directory: Path) -> list[Leftover]:
    """Returns what interrupted processes left in ``directory``."""
    matches = [(path, HIDDEN.fullmatch(path.name)) for path in directory.iterdir()] if directory.is_dir() else []
    return [Leftover(path, path.with_name(match["name"]), match["purpose"]) for path, match in matches if match]


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
