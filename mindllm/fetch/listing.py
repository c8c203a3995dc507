"""Listings of the files of a model, with every field validated before use, and the choice of files to fetch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from mindllm.errors import RunFailed, UserError, shortened

MAX_FILES = 10_000
MAX_FILE_SIZE = 1 << 41
"""Bytes, 2.2 TB: the weights of the largest public models together."""
MAX_PATH, MAX_COMPONENT = 512, 180  # bytes; Linux allows 255 for a component, and unfinished files have longer names
MAX_LICENSE = 100
INCOMPLETE, LOCK = ".incomplete", ".lock"
"""Suffix of an unfinished file, and the name of the lock, in the directory that a download writes."""
DESCRIPTIONS = (
    *("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "README.md"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)
"""Files of the top directory besides weights: architecture, tokenizer, model card, license."""
SAFETENSORS, GGUF = ".safetensors", ".gguf"
DUPLICATES = "consolidated"  # the same weights under the names of the program that trained them
MAX_NAMED = 5
SHA256, GIT_HASH = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a published model: its path, its bytes, and its digest at the hub.

    Attributes:
        sha256: SHA-256 of the content in hexadecimal digits; empty where the hub does not give it.
        blob: SHA-1 of the file as an object of git; empty where the hub does not give it.
    """

    name: str
    size: int
    sha256: str = ""
    blob: str = ""

    @property
    def digest(self) -> str:
        """The digest that the content is verified by; empty where there is none."""
        return self.sha256 or self.blob


@dataclass(frozen=True)
class Listing:
    """The files of a model at one revision.

    Attributes:
        revision: the revision to request files at: a commit where the hub names it, else a branch or tag.
        commit: the commit of ``revision``; null where the hub does not name it.
    """

    repository: str
    revision: str
    commit: str | None
    files: tuple[RemoteFile, ...]
    license: str | None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def unchecked(self) -> list[str]:
        """Names of files without a digest."""
        return [file.name for file in self.files if not file.digest]


def check_file(repository: str, name: Any, size: Any, sha256: Any = None, blob: Any = None) -> RemoteFile:
    """Return the file that fields of a hub's JSON describe.

    Raises:
        UserError: the name would be written outside of the directory of the model, or over a file of the download itself.
        RunFailed: a field is missing, or of another type or form.
    """
    if not isinstance(name, str):
        raise RunFailed(f"{repository}: the hub lists a file without a name ({shortened(name)})")
    parts = PurePosixPath(name).parts
    is_plain = name == "/".join(parts) and not name.startswith("/") and "\\" not in name and name.isprintable()
    is_plain = is_plain and len(name.encode()) <= MAX_PATH and name != LOCK
    for part in parts if is_plain else ():
        is_plain &= bool(part.strip(".")) and len(part.encode()) <= MAX_COMPONENT and not part.endswith(INCOMPLETE)
    if not is_plain:
        raise UserError(f"{repository}: invalid file name in the hub's listing ({shortened(name)}); nothing is fetched")
    if type(size) is not int or not 0 <= size <= MAX_FILE_SIZE:
        raise RunFailed(f"{repository}: the hub gives no valid size of {shortened(name)} ({shortened(size)})")
    for title, digest, form in (("SHA-256", sha256, SHA256), ("git checksum", blob, GIT_HASH)):
        if digest not in (None, "") and not (isinstance(digest, str) and form.fullmatch(digest.lower())):
            raise RunFailed(f"{repository}: the hub gives no valid {title} of {shortened(name)} ({shortened(digest)})")
    return RemoteFile(name, size, (sha256 or "").lower(), (blob or "").lower())


def check_files(
    repository: str, entries: Any, read_file: Callable[[str, dict[str, Any]], RemoteFile]
) -> tuple[RemoteFile, ...]:
    """Return the files of a hub's list, of which ``read_file`` reads each entry, where one directory can hold them.

    Raises:
        RunFailed: ``entries`` is not a list of objects.
        UserError: there are too many, two have one name, or a file has the name of another file's directory.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RunFailed(f"{repository}: the hub answers without a list of files")
    if len(entries) > MAX_FILES:
        raise UserError(f"{repository}: lists {len(entries):,} files; at most {MAX_FILES:,} are accepted")
    files = tuple(read_file(repository, entry) for entry in entries)
    names = {file.name for file in files}
    directories = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if len(names) < len(files) or names & directories:
        raise UserError(f"{repository}: the hub lists a name twice, or both as a file and as a directory")
    return files


def check_license(value: Any) -> str | None:
    """Return the name of a license as one printable line; None where the hub gives none."""
    names = value if isinstance(value, list) else [value]
    text = ", ".join(name for name in names if isinstance(name, str))
    return shortened(text, MAX_LICENSE) if text.strip() else None


def choose_files(repository: str, files: Sequence[RemoteFile], include: Sequence[str] = ()) -> list[RemoteFile]:
    """Return the files to fetch, in the order of the listing.

    Weights are the safetensors files of the top directory, or the only GGUF file. Patterns of a shell in ``include`` replace
    this choice: all files that match one are taken.

    Raises:
        UserError: there are no such weights, or a pattern matches nothing. The message names files that exist.
    """
    top = [file.name for file in files if "/" not in file.name]
    chosen = {name for name in top if any(fnmatchcase(name, pattern) for pattern in DESCRIPTIONS)}
    for pattern in include:
        matches = {file.name for file in files if fnmatchcase(file.name, pattern)}
        if not matches:
            raise UserError(f"--include {pattern}: {repository} has no such file; it has {_format_names(files)}")
        chosen |= matches
    if not include:
        weights = {name for name in top if name.endswith(SAFETENSORS)}
        chosen |= {name for name in weights if not name.startswith(DUPLICATES)} or weights or {_gguf(repository, files)}
    return [file for file in files if file.name in chosen]


def _gguf(repository: str, files: Sequence[RemoteFile]) -> str:
    """Return the name of the only GGUF file."""
    found = [file for file in files if file.name.endswith(GGUF)]
    if not found:
        raise UserError(
            f"{repository}: has no safetensors files; it has {_format_names(files)}; choose weights: --include PATTERN "
            "(pickles are read without running code in them)"
        )
    if len(found) > 1:
        raise UserError(f"{repository}: has several GGUF files ({_format_names(found)}); choose one: --include NAME")
    return found[0].name


def _format_names(files: Sequence[RemoteFile]) -> str:
    names = [file.name for file in files]
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more if names else "nothing"
