"""Schema lookups: the sections and keys at a path. Used for suggestions, overrides and the reference page."""

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
def section_fields(section: type[Section]) -> Fields:
    """Return the fields of a section by their YAML names."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a value of this type may be, in order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType, tuple):
        return [section for argument in get_args(annotation) for section in sections_in(argument)]
    return []


def scalar_types(annotation: Any) -> set[Any]:
    """Return the plain types (``str``, ``int``, ``NoneType``, ...) of a value of this type."""
    if get_origin(annotation) is Annotated:
        return scalar_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for argument in get_args(annotation) for kind in scalar_types(argument)}
    return {annotation} if isinstance(annotation, type) else set()


def section_type(section: type[Section]) -> str:
    """Return the value of ``type`` that selects this section among its alternatives."""
    info = section.model_fields.get("type")
    literals = typing.get_args(info.annotation) if info else ()
    return str(literals[0]) if literals else section.__name__


def sections_at(root: type[Section], path: KeyPath, data: Any = None) -> list[type[Section]]:
    """Return the sections that may be at ``path``. If ``data`` has a ``type``, only the section with this type."""
    sections = [root]
    for key in path:
        if not isinstance(key, int):
            infos = [section_fields(section)[key] for section in sections if key in section_fields(section)]
            sections = [section for info in infos for section in sections_in(info.annotation)]
        data = child(data, key)
        if isinstance(data, dict) and "type" in data:
            sections = [section for section in sections if section_type(section) == data["type"]] or sections
    return sections


def kinds_with(root: type[Section], path: KeyPath, key: str) -> list[str]:
    """Return the values of ``type`` for which ``key`` is valid at ``path``, for this section or the section around it."""
    kinds: dict[str, None] = {}
    for section in sections_at(root, path):
        if key not in section_fields(section):
            continue
        around = [] if "type" in section_fields(section) else sections_at(root, path[:-1])
        holders = [
            holder
            for holder in around
            if "type" in section_fields(holder)
            and section in sections_in(section_fields(holder)[str(path[-1])].annotation)
        ]
        kinds |= dict.fromkeys(map(section_type, holders or [section]))
    return list(kinds)


def default_list(root: type[Section], key: str) -> list[dict[str, Any]] | None:
    """Return the entries of a list of sections with a default, as YAML has them; None for other keys."""
    info = section_fields(root).get(key)
    entries = info.default if info is not None else None
    if not isinstance(entries, tuple) or not all(isinstance(entry, Section) for entry in entries):
        return None
    return [entry.model_dump(by_alias=True, exclude_unset=True) for entry in entries]


def fields_at(root: type[Section], path: KeyPath, data: Any = None) -> list[FieldInfo]:
    """Return the fields that may be at ``path``: several if the section has alternatives."""
    sections = [section_fields(section) for section in sections_at(root, path[:-1], data)]
    return [fields[str(path[-1])] for fields in sections if str(path[-1]) in fields]


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


def key_paths(root: type[Section], key: str) -> list[str]:
    """Return the dotted paths of all keys called ``key``. Keys inside lists count only if there are no others."""
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
    """Yield every key below ``root``: its path, its field and its section."""
    for name, info in section_fields(root).items():
        yield (*path, name), info, root
        for section in sections_in(info.annotation):
            yield from walk(section, (*path, name))
