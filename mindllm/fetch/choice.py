"""Which files of a published model are fetched: weights in safetensors, what describes them, no pickles and no code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mindllm.errors import UserError, shortened

DESCRIBING = (
    *("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "README.md"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)
"""Beside the weights, in the directory itself: architecture, tokenizer, model card, licence."""
SAFETENSORS, GGUF = ".safetensors", ".gguf"
TWICE = "consolidated"  # the same weights again, in the names of who trained them
MOST_NAMED = 8
LONGEST_NAME = 512


@dataclass(frozen=True)
class RemoteFile:
    """A file of a published model: its path there, its bytes, and the checksum that the hub knows it by.

    Attributes:
        sha256: of a large file, else empty.
        blob: the checksum of git of a small file, else empty.
    """

    name: str
    size: int
    sha256: str = ""
    blob: str = ""


def chosen(repository: str, files: Sequence[RemoteFile], include: Sequence[str] = ()) -> list[RemoteFile]:
    """Return the files to fetch, in order: what describes the model, and its weights.

    Weights are the safetensors files of the directory itself, or its one GGUF file; with ``include``, patterns as of a shell,
    what any of them matches instead, whatever it is.

    Raises:
        UserError: there are no such weights, or a pattern matches nothing; it names what there is.
    """
    for file in files:
        _refuse_elsewhere(repository, file.name)
    taken = {file.name for file in files if any(fnmatchcase(file.name, pattern) for pattern in DESCRIBING)}
    taken = {name for name in taken if "/" not in name}
    if include:
        for pattern in include:
            matching = {file.name for file in files if fnmatchcase(file.name, pattern)}
            if not matching:
                raise UserError(f"--include {pattern}: {repository} has no such file; it has {_named(files)}")
            taken |= matching
        return [file for file in files if file.name in taken]
    weights = {file.name for file in files if file.name.endswith(SAFETENSORS) and "/" not in file.name}
    usual = {name for name in weights if not name.startswith(TWICE)}
    weights = usual or weights or _only_gguf(repository, files)
    return [file for file in files if file.name in taken | weights]


def _only_gguf(repository: str, files: Sequence[RemoteFile]) -> set[str]:
    found = [file for file in files if file.name.endswith(GGUF)]
    if len(found) == 1:
        return {found[0].name}
    if found:
        raise UserError(f"{repository}: has several GGUF files ({_named(found)}); choose one: --include NAME")
    raise UserError(
        f"{repository}: has no safetensors files; it has {_named(files)}; choose weights: --include PATTERN (pickled ones are "
        "read without running what is in them)"
    )


def _refuse_elsewhere(repository: str, name: str) -> None:
    """A name that would be written outside of the directory, or over what is kept there."""
    parts = PurePosixPath(name).parts
    plain = name == "/".join(parts) and not name.startswith("/") and all(part.strip(".") for part in parts)
    if not plain or len(name) > LONGEST_NAME or "\\" in name or not name.isprintable():
        raise UserError(f"{repository}: lists a file that is no plain path ({shortened(name)}); nothing is fetched")


def _named(files: Sequence[RemoteFile]) -> str:
    names = [file.name for file in files]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more if names else "nothing"
