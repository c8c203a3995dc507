"""``manifest.json``, written last into a checkpoint: its files with roles, sizes and checksums, and their verification.

Several files may share a role: each rank writes its own.
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
MODEL_CONFIG = "config.json"  # Hugging Face's
MANIFEST = "manifest.json"

WEIGHTS, OPTIMIZER, STATE = "weights", "optimizer", "state"  # roles


class DamagedCheckpointError(UserError):
    """A checkpoint that must not be loaded. The message names the file and its problem."""

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
        """Return the bytes of the file: JSON with a checksum of itself."""
        fields = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**fields, "manifest_sha256": _digest(fields)}, indent=2).encode()

    def names(self, role: str) -> list[str]:
        """Return the names of the files of a role."""
        return [entry.name for entry in self.files if entry.role == role]


def read_manifest(directory: Path) -> Manifest:
    """Read ``directory/manifest.json``.

    Raises:
        DamagedCheckpointError: the manifest is missing, damaged, of another program, or of a newer format.
    """
    path = directory / MANIFEST
    try:
        fields = read_json(path)
    except FileNotFoundError:
        if (directory / MODEL_CONFIG).is_file() and any(directory.glob("*.safetensors")):
            raise UserError(
                f"{directory}: is a Hugging Face model; pass a checkpoint of mindllm, or an adapter"
            ) from None
        raise DamagedCheckpointError(
            path,
            "is missing: the directory is neither a complete checkpoint of mindllm nor a Hugging Face model, which has a "
            "config.json",
        ) from None
    except OSError as error:
        raise DamagedCheckpointError(
            path, f"cannot be read ({error.strerror}): it is truncated, altered or foreign"
        ) from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise DamagedCheckpointError(path, f'is foreign: "format": "{FORMAT}" is missing')
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DamagedCheckpointError(
            path,
            f"is of the newer format {version}, written by {fields.get('created_by')}; "
            f"mindllm {__version__} reads up to format {FORMAT_VERSION}: install a newer mindllm",
        )
    if fields.pop("manifest_sha256", None) != _digest(fields):
        raise DamagedCheckpointError(path, "is altered: its content does not match its checksum")
    try:
        files = tuple(FileEntry(**entry) for entry in fields["files"])
    except (KeyError, TypeError) as error:
        raise DamagedCheckpointError(path, f"is foreign: invalid description of files ({error})") from None
    valid = type(fields.get("step")) is int
    for entry in files:
        texts = all(isinstance(text, str) for text in (entry.name, entry.role, entry.sha256))
        valid = valid and texts and Path(entry.name).name == entry.name and type(entry.size) is int
    if not valid:
        raise DamagedCheckpointError(path, "is foreign: invalid step or description of files")
    return Manifest(fields["step"], files, str(fields.get("created_by")))


def verify_files(directory: Path, manifest: Manifest, roles: tuple[str, ...], share: int = 0, shares: int = 1) -> None:
    """Compare the files of some roles with the manifest: all sizes first, then all checksums.

    Of ``shares`` processes that verify together, each computes the checksums of every ``shares``-th file.

    Raises:
        DamagedCheckpointError: names the first file that is missing, truncated, altered, or not listed in the manifest.
    """
    entries = [entry for entry in manifest.files if entry.role in roles]
    for entry in entries:
        path = directory / entry.name
        if not path.is_file():
            raise DamagedCheckpointError(path, "is missing")
        size = path.stat().st_size
        if size != entry.size:
            word = "truncated" if size < entry.size else "altered"
            raise DamagedCheckpointError(path, f"is {word}: it has {size} bytes instead of {entry.size}")
    listed = {file.name for file in manifest.files}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in listed:
            raise DamagedCheckpointError(path, f"is foreign: {MANIFEST} does not list it; move it elsewhere")
    for entry in entries[share::shares]:
        if file_sha256(directory / entry.name) != entry.sha256:
            raise DamagedCheckpointError(directory / entry.name, f"is altered: its SHA-256 differs from {MANIFEST}")


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
