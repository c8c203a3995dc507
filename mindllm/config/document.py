"""A YAML file as plain data that remembers where every value was written; mistakes in it; merging two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindllm.errors import LONGEST_PART, bounded

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """A place: a line of a file, or an option of the command line."""

    file: str = ""
    line: int | None = None
    option: str = ""

    def __str__(self) -> str:
        if self.option:
            return bounded(self.option, LONGEST_PART)
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One mistake: where, which key, and what to write instead."""

    origin: Origin | None
    path: KeyPath
    message: str

    def __str__(self) -> str:
        parts = [str(self.origin or ""), bounded(dotted(self.path), LONGEST_PART), bounded(self.message)]
        return ": ".join(part for part in parts if part)


@dataclass
class Document:
    """A tree of plain values, the origin of every path in it, and the mistakes found while reading it."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def dotted(path: KeyPath) -> str:
    """``("callbacks", 0, "type")`` as ``callbacks.0.type``."""
    return ".".join(map(str, path))


def child(data: Any, key: str | int) -> Any:
    """The value under ``key`` of a mapping or a list, or ``None``."""
    if isinstance(data, dict):
        return data.get(key)
    if isinstance(data, list | tuple) and isinstance(key, int) and key < len(data):
        return data[key]
    return None


def closest_origin(origins: Mapping[KeyPath, Origin], path: KeyPath, source: Path | None = None) -> Origin | None:
    """Returns the origin of ``path``, or of the nearest section around it, or of the file."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return Origin(file=str(source)) if source else None


def merge(base: Document, change: Document) -> Document:
    """Returns ``base`` with the values of ``change``: mappings merge key by key, everything else is replaced.

    A section whose ``type`` changes starts afresh: the keys of the former type would be errors under the new one.
    """
    merged = Document({}, {}, base.problems + change.problems)
    origins = dict(base.origins)
    merged.data = _merge_mapping(base.data, change.data, (), origins)
    origins.update(change.origins)
    merged.origins = origins
    return merged


def _merge_mapping(base: dict, change: dict, path: KeyPath, origins: dict[KeyPath, Origin]) -> dict:
    result = dict(base)
    for key, value in change.items():
        former = result.get(key)
        if isinstance(former, dict) and isinstance(value, dict) and not _changes_type(former, value):
            result[key] = _merge_mapping(former, value, (*path, key), origins)
        else:
            if key in base:
                _forget(origins, (*path, key))
            result[key] = value
    return result


def _changes_type(former: dict, value: dict) -> bool:
    return "type" in value and "type" in former and value["type"] != former["type"]


def _forget(origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]
