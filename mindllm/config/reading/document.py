"""A YAML file as plain data that remembers where every value was written; mistakes in it; merging two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindllm.errors import KeyPath, Origin, Problem, dotted

__all__ = ["Document", "KeyPath", "Origin", "Problem", "at", "child", "closest_origin", "dotted", "merge"]


@dataclass
class Document:
    """A tree of plain values, the origin of every path in it, and the mistakes found while reading it."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def child(data: Any, key: str | int) -> Any:
    """The value under ``key`` of a mapping or a list, or ``None``."""
    if isinstance(data, dict):
        return data.get(key)
    if isinstance(data, list | tuple) and isinstance(key, int) and key < len(data):
        return data[key]
    return None


def at(data: Any, path: KeyPath) -> Any:
    """Return the value at ``path``, or ``None``."""
    for key in path:
        data = child(data, key)
    return data


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
