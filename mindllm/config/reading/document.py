"""A YAML file as plain data with the place of every value; problems; merging of two documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindllm.errors import KeyPath, Origin, Problem, dotted

__all__ = [
    "Document",
    "KeyPath",
    "Origin",
    "Problem",
    "at",
    "child",
    "closest_origin",
    "dotted",
    "leaves",
    "merge",
    "path_of",
    "remove",
    "without_related",
]


@dataclass
class Document:
    """A tree of plain values, the origin of every path in it, and the mistakes found while reading it."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def path_of(key: str) -> KeyPath:
    """Return the path of a dotted key; numbers are places in lists."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value that is not a section, with its path. Lists of sections are entered, other lists are values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    elif path:
        yield path, value


def child(data: Any, key: str | int) -> Any:
    """Return the value under ``key`` of a mapping or a list, or ``None``."""
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


def remove(data: Any, path: KeyPath) -> Any:
    """Remove the value at ``path`` of nested mappings, and return it; None where there is none."""
    section = at(data, path[:-1]) if path else None
    return section.pop(path[-1], None) if isinstance(section, dict) else None


def without_related(problems: Iterable[Problem], others: Iterable[Problem]) -> list[Problem]:
    """Return the ``problems`` whose key is not the key of any of ``others``, nor around or inside of it."""
    paths = {other.path for other in others}
    around = {path[:length] for path in paths for length in range(1, len(path))}
    return [
        problem
        for problem in problems
        if problem.path not in around
        and not any(problem.path[:end] in paths for end in range(1, len(problem.path) + 1))
    ]


def closest_origin(origins: Mapping[KeyPath, Origin], path: KeyPath, source: Path | None = None) -> Origin | None:
    """Return the origin of ``path``, else of the nearest section around it, else of the file."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return Origin(file=str(source)) if source else None


def merge(base: Document, change: Document) -> Document:
    """Return ``base`` with the values of ``change``: mappings merge by key, other values are replaced.

    A section whose ``type`` changes is replaced, because the keys of the former type would be errors under the new one.
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
        if (
            isinstance(former, dict)
            and isinstance(value, dict)
            and not ("type" in value and "type" in former and value["type"] != former["type"])
        ):
            result[key] = _merge_mapping(former, value, (*path, key), origins)
        else:
            _drop_origins(origins, (*path, key), former)
            result[key] = value
    return result


def _drop_origins(origins: dict[KeyPath, Origin], path: KeyPath, value: Any) -> None:
    """Remove the origins of ``path`` and of every path inside its former ``value``."""
    origins.pop(path, None)
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        _drop_origins(origins, (*path, key), entry)
