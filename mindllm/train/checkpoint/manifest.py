"""``manifest.json``, written last into a checkpoint: what belongs to it, with sizes and checksums, and the check that it does.

A checkpoint is a list of files by role, so that several files may share a role one day (shards of one writer each).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.outside import read_json
from mindllm.train.checkpoint.tensors import file_sha256
from mindllm.versions import __version__

FORMAT = "mindllm-checkpoint"
FORMAT_VERSION = 1
MODEL_CONFIG = "config.json"  # of Hugging Face
MANIFEST = "manifest.json"

WEIGHTS, OPTIMIZER, STATE = "weights", "optimizer", "state"  # roles


class DamagedCheckpointError(UserError):
    """A checkpoint that must not be loaded; the message names the file and what is wrong with it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    role: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    files: tuple[FileEntry, ...]
    created_by: str = f"mindllm {__version__}"

    def render(self) -> bytes:
        """Returns the bytes of the file: JSON that carries a checksum of itself."""
        fields = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**fields, "manifest_sha256": _digest(fields)}, indent=2).encode()


def read_manifest(directory: Path) -> Manifest:
    """Reads ``directory/manifest.json``.

    Raises:
        DamagedCheckpointError: it is missing, no JSON, altered, of another program, or of a newer format.
    """
    path = directory / MANIFEST
    try:
        fields = read_json(path)
    except FileNotFoundError:
        if (directory / MODEL_CONFIG).is_file() and any(directory.glob("*.safetensors")):
            raise UserError(
                f"{directory}: is a whole model of Hugging Face; a checkpoint of mindllm, or an adapter, is needed here"
            ) from None
        raise DamagedCheckpointError(
            path,
            "is missing: the directory is not a checkpoint of mindllm, or a damaged one; "
            "nor is it one of Hugging Face, which has a config.json",
        ) from None
    except OSError as error:
        raise DamagedCheckpointError(
            path, f"cannot be read ({error.strerror}): it is truncated, altered or foreign"
        ) from None
    return _parse(path, fields)


def _parse(path: Path, fields: Any) -> Manifest:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise DamagedCheckpointError(path, f'is foreign: it does not say "format": "{FORMAT}"')
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DamagedCheckpointError(
            path,
            f"is of the newer format {version}, written by {fields.get('created_by')}; "
            f"mindllm {__version__} reads up to format {FORMAT_VERSION}: install a newer mindllm",
        )
    if fields.pop("manifest_sha256", None) != _digest(fields):
        raise DamagedCheckpointError(path, "is altered: its content does not have the checksum it carries")
    try:
        files = tuple(FileEntry(**entry) for entry in fields["files"])
    except (KeyError, TypeError) as error:
        raise DamagedCheckpointError(path, f"is foreign: its files are not described as here ({error})") from None
    if type(fields.get("step")) is not int or not all(map(_is_described, files)):
        raise DamagedCheckpointError(path, "is foreign: its step or its files are not described as here")
    return Manifest(fields["step"], files, str(fields.get("created_by")))


def _is_described(entry: FileEntry) -> bool:
    texts = (entry.name, entry.role, entry.sha256)
    inside = isinstance(entry.name, str) and Path(entry.name).name == entry.name
    return inside and all(isinstance(text, str) for text in texts) and type(entry.size) is int


def verify_files(directory: Path, manifest: Manifest, roles: tuple[str, ...], share: int = 0, shares: int = 1) -> None:
    """Checks that the files of these roles are the ones that were written: all sizes first, then all checksums.

    Of ``shares`` processes that verify together, each computes the checksums of every ``shares``-th file.

    Raises:
        DamagedCheckpointError: names the first file that is missing, truncated or altered, or tensors the manifest does not know.
    """
    entries = [entry for entry in manifest.files if entry.role in roles]
    for entry in entries:
        _check_size(directory / entry.name, entry.size)
    for stranger in sorted(
        {path.name for path in directory.glob("*.safetensors")} - {file.name for file in manifest.files}
    ):
        raise DamagedCheckpointError(
            directory / stranger, f"is foreign: {MANIFEST} does not list it; move it elsewhere"
        )
    for entry in entries[share::shares]:
        if file_sha256(directory / entry.name) != entry.sha256:
            raise DamagedCheckpointError(
                directory / entry.name, f"is altered: its SHA-256 is not the one in {MANIFEST}"
            )


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise DamagedCheckpointError(path, "is missing")
    found = path.stat().st_size
    if found != size:
        word = "truncated" if found < size else "altered"
        raise DamagedCheckpointError(path, f"is {word}: it has {found} bytes, {MANIFEST} says {size}")


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
