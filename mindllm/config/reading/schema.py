"""Walks the schema: which sections and keys stand at a path. Used for suggestions, overrides and the reference page."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from mindllm.config.reading.document import KeyPath, child
from mindllm.config.section import Section

Fields = dict[str, FieldInfo]


@cache
def fields_of(section: type[Section]) -> Fields:
    """Return the fields of a section by their YAML names."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def sections_in(annotation: Any) -> list[type[Section]]:
    """The sections that a value of this type may be, in order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType, tuple):
        return [section for argument in get_args(annotation) for section in sections_in(argument)]
    return []


def scalar_types(annotation: Any) -> set[Any]:
    """The plain types (``str``, ``int``, ``NoneType``, ...) that a value of this type may have."""
    if get_origin(annotation) is Annotated:
        return scalar_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for argument in get_args(annotation) for kind in scalar_types(argument)}
    return {annotation} if isinstance(annotation, type) else set()


def kind_of(section: type[Section]) -> str:
    """The value of ``type`` that selects this section among its alternatives."""
    info = section.model_fields.get("type")
    literals = typing.get_args(info.annotation) if info else ()
    return str(literals[0]) if literals else section.__name__


def sections_at(root: type[Section], path: KeyPath, data: Any = None) -> list[type[Section]]:
    """The sections that may stand at ``path``; where ``data`` says a ``type``, only that one."""
    sections = [root]
    for key in path:
        if not isinstance(key, int):
            infos = [fields_of(section)[key] for section in sections if key in fields_of(section)]
            sections = [section for info in infos for section in sections_in(info.annotation)]
        data = child(data, key)
        if isinstance(data, dict) and "type" in data:
            sections = [section for section in sections if kind_of(section) == data["type"]] or sections
    return sections


def kinds_with(root: type[Section], path: KeyPath, key: str) -> list[str]:
    """The values of ``type``, of the sections at ``path`` or of those around them, under which ``key`` is a key there."""
    found: dict[str, None] = {}
    for section in sections_at(root, path):
        if key not in fields_of(section):
            continue
        around = [] if "type" in fields_of(section) else sections_at(root, path[:-1])
        holders = [
            holder
            for holder in around
            if "type" in fields_of(holder) and section in sections_in(fields_of(holder)[str(path[-1])].annotation)
        ]
        found |= dict.fromkeys(map(kind_of, holders or [section]))
    return list(found)


def default_list(root: type[Section], key: str) -> list[dict[str, Any]] | None:
    """The entries, as YAML has them, of a list of sections that has a default; None for other keys."""
    info = fields_of(root).get(key)
    entries = info.default if info is not None else None
    if not isinstance(entries, tuple) or not all(isinstance(entry, Section) for entry in entries):
        return None
    return [entry.model_dump(by_alias=True, exclude_unset=True) for entry in entries]


def fields_at(root: type[Section], path: KeyPath, data: Any = None) -> list[FieldInfo]:
    """The fields that may stand at ``path``: several only where the section has alternatives."""
    found = [fields_of(section) for section in sections_at(root, path[:-1], data)]
    return [fields[str(path[-1])] for fields in found if str(path[-1]) in fields]


def has_key(root: type[Section], path: KeyPath) -> bool:
    """Return True if the schema has a key at ``path``, or one around it that takes any keys below it (patterns)."""
    fields: list[Any] = [0]
    for length in range(1, len(path) + 1):
        if isinstance(path[length - 1], int):
            continue
        fields = fields_at(root, path[:length])
        if fields and not sections_at(root, path[:length]):
            return True
    return bool(fields)


def places_of(root: type[Section], key: str) -> list[str]:
    """Return the dotted paths of all keys called ``key``. Keys inside lists count only where there are no others."""
    return _places(root).get(key, [])


@cache
def _places(root: type[Section]) -> dict[str, list[str]]:
    """Return the dotted paths of every key by its last part."""
    lists = {
        path for path, info, _ in walk(root) if get_origin(info.annotation) is tuple and sections_in(info.annotation)
    }
    places: dict[str, tuple[set[str], set[str]]] = {}
    for path, _, _ in walk(root):
        is_inside = any(path[:length] in lists for length in range(1, len(path) + 1))
        places.setdefault(path[-1], (set(), set()))[is_inside].add(".".join(path))
    return {key: sorted(outside or inside) for key, (outside, inside) in places.items()}


def walk(root: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo, type[Section]]]:
    """Every key below ``root``: its path, its field, and the section it stands in."""
    for name, info in fields_of(root).items():
        yield (*path, name), info, root
        for section in sections_in(info.annotation):
            yield from walk(section, (*path, name))
