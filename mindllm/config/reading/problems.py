"""Turns pydantic's errors into problems that name the place, the key, the value, and what to write instead."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mindllm.config.dataset import SPLIT_PATTERN
from mindllm.config.reading.document import Document, KeyPath, Problem, child, closest_origin
from mindllm.config.reading.foreign import foreign_advice
from mindllm.config.reading.schema import (
    fields_at,
    key_paths,
    kinds_with,
    scalar_types,
    section_fields,
    section_type,
    sections_at,
)
from mindllm.config.reading.yaml_tree import LONGEST_VALUE, inline_yaml, line_advice, without_quotes
from mindllm.config.runtime import DEVICE_MEMORY_PATTERN
from mindllm.config.section import Section
from mindllm.errors import CLOSE, LONGEST_PART, MOST_SHOWN, MOST_SUGGESTIONS, few, nearest, text_of
from mindllm.files import SIZE_PATTERN
from mindllm.shorthands import FOREIGN_OPTIONS

EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (in quotes if it looks like something else)",
    "none_required": "null",
    "tuple_type": "a list",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "dict_type": "a mapping",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "{form}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "int_parsing_size": "an integer that a machine computes with",
    "list_type": "a list",
    "mapping_type": "a mapping",
    "is_instance_of": "of type {class}",
}
FORMS = {
    SIZE_PATTERN: "a size such as 5GB or 500MB",
    DEVICE_MEMORY_PATTERN: "a size such as 58GB",
    SPLIT_PATTERN: "one to three weights such as 949,50,1",
}
PARSED_TYPES = {"int_type": int, "float_type": float, "bool_type": bool}
REQUIRED = "this key is required"
NONE = "None"
FREE_TEXT_KEYS = (("input_data",), ("generation", "stop_strings"))  # keys under which a person may well mean that word
FOLLOWS_FROM_ANOTHER = "default_factory_not_called"


def schema_problems(
    error: ValidationError, document: Document, root: type[Section], source: Path | None
) -> list[Problem]:
    """Return one problem per key, in the order of the file. Those beyond :data:`MOST_SHOWN` have no suggestions."""
    grouped: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] != FOLLOWS_FROM_ANOTHER:
            grouped.setdefault(_key_path(detail, document.data), []).append(detail)
    # errors inside a matching alternative are more specific than errors about the alternatives
    entered = {path[:length] for path in grouped for length in range(len(path))}
    problems: list[Problem] = []
    for path, details in grouped.items():
        if path in entered:
            continue
        message = (
            _message(path, details, document.data, root) if len(problems) < MOST_SHOWN else plain_message(details[0])
        )
        problems.append(Problem(closest_origin(document.origins, path, source), path, message))
    return problems


def shown(value: Any) -> str:
    """Return a value as YAML writes it, on one line and not long. Texts that look like something else are in quotes."""
    if isinstance(value, dict | list | tuple):
        entries = itertools.islice(value.items() if isinstance(value, dict) else value, LONGEST_VALUE)
        value = dict(entries) if isinstance(value, dict) else list(entries)  # the rest would not be seen
    text = value if isinstance(value, str) and isinstance(without_quotes(value), str) else text_of(value, inline_yaml)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def _key_path(detail: Any, data: Any) -> KeyPath:
    """Return pydantic's location without names of union members, which are not keys of the file."""
    path: KeyPath = ()
    location = detail["loc"]
    for position, key in enumerate(location):
        is_missing = detail["type"] == "missing" and position == len(location) - 1
        present = key in data if isinstance(data, dict) else isinstance(data, list) and isinstance(key, int)
        if present or is_missing:
            path = (*path, key)
            data = child(data, key)
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found") and isinstance(data, dict):
        path = (*path, "type")
    return path


def _message(path: KeyPath, details: list[Any], data: Any, root: type[Section]) -> str:
    kinds = {detail["type"] for detail in details}
    value = details[0]["input"]
    if "extra_forbidden" in kinds:
        return unknown_key(path, value, data, root)
    if "missing" in kinds:
        return REQUIRED
    if kinds & {"union_tag_invalid", "union_tag_not_found"}:
        return _wrong_type(path, details[0], root)
    if all(kind in EXPECTED for kind in kinds):
        forms = dict.fromkeys(_text_form(detail, path, data, root) or _expected(detail) for detail in details)
        advice = _nearest_literal(details, value) or _quotes_hint(kinds, value) or _section_hint(kinds, value)
        advice = advice or _null_hint(path, value, data, root)
        return f"must be {' or '.join(forms)} (value {shown(value)}){advice}"
    return plain_message(details[0])


def plain_message(detail: Any) -> str:
    """Return an error of pydantic as a message about the value, without the name of the key."""
    value = detail["input"]
    if detail["type"] == "missing":
        return REQUIRED
    if detail["type"] == "extra_forbidden":
        return f"unknown key (value {shown(value)})"
    if detail["type"] in EXPECTED:
        return f"must be {_expected(detail)} (value {shown(value)})"
    message = detail["msg"].removeprefix("Value error, ")
    return message if isinstance(value, dict) else f"{message} (value {shown(value)})"


def _expected(detail: Any) -> str:
    context = dict(detail.get("ctx", {}))
    if pattern := context.get("pattern"):
        context["form"] = FORMS.get(pattern, f"text of the form {pattern}")
    if detail["type"] == "literal_error":
        # return pydantic's list of words, or for a long list the words nearest to value
        expected = str(context["expected"])
        value = detail["input"]
        words = re.findall(r"'[^']*'|[^\s,']+(?=,|$| or )", expected)
        context["expected"] = expected if len(words) <= MOST_SUGGESTIONS else f"one of {few(words, repr(str(value)))}"
    return EXPECTED[detail["type"]].format(**context)


def _text_form(detail: Any, path: KeyPath, data: Any, root: type[Section]) -> str:
    """Return the required form of a text under this key, for a value that is not text; empty if any text is valid."""
    if detail["type"] != "string_type":
        return ""
    patterns = [getattr(part, "pattern", None) for info in fields_at(root, path, data) for part in info.metadata]
    return next((FORMS[pattern] for pattern in patterns if pattern in FORMS), "")


def _quotes_hint(kinds: set[str], value: Any) -> str:
    """Return the hint to remove quotes, if they are the mistake."""
    plain = without_quotes(value) if isinstance(value, str) else value
    fits = type(plain) in {PARSED_TYPES[kind] for kind in kinds if kind in PARSED_TYPES} and plain is not value
    return f"; write {value} without quotes" if fits else ""


def _section_hint(kinds: set[str], value: Any) -> str:
    """Return the hint for a section that YAML read as text because of its syntax."""
    advice = line_advice(value) if kinds & {"model_type", "dict_type"} and isinstance(value, str) else ""
    return f"; {advice}" if advice else ""


def _null_hint(path: KeyPath, value: Any, data: Any, root: type[Section]) -> str:
    """Return the hint how to write an empty value instead of ``null`` or the text ``None``."""
    if value is not None and value != NONE:
        return ""
    infos = fields_at(root, path, data)
    if any(NoneType in scalar_types(info.annotation) for info in infos):
        return "; write null for nothing"
    return "; write '' for nothing" if any(map(_takes_any_text, infos)) else ""


def _takes_any_text(info: FieldInfo) -> bool:
    bounded = any(getattr(part, name, None) for part in info.metadata for name in ("pattern", "min_length"))
    return str in scalar_types(info.annotation) and not bounded


def null_texts(document: Document, root: type[Section]) -> Iterator[Problem]:
    """Yield a problem for every text ``None``, which is not null in YAML, under keys that accept text."""
    for path, value in _values(document.data, ()):
        if (
            value == NONE
            and path not in FREE_TEXT_KEYS
            and any(map(_takes_any_text, fields_at(root, path, document.data)))
        ):
            message = f"is a text in YAML, not nothing (value {value}){_null_hint(path, value, document.data, root)}"
            yield Problem(closest_origin(document.origins, path), path, message, value)


def _values(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield (*path, key), value
        yield from _values(value, (*path, key))


def _nearest_literal(details: Iterable[Any], value: Any) -> str:
    words = [
        word.strip(" '") for d in details if d["type"] == "literal_error" for word in d["ctx"]["expected"].split(",")
    ]
    words = [part for word in words for part in word.replace("'", "").split(" or ")]
    hint = nearest(value, words) if words and isinstance(value, str) else ""
    return hint if "did you mean" in hint else ""


def _wrong_type(path: KeyPath, detail: Any, root: type[Section]) -> str:
    around = path[:-1] if path and path[-1] == "type" else path
    kinds = [section_type(section) for section in sections_at(root, around)]
    if detail["type"] == "union_tag_not_found":
        if not isinstance(detail["input"], dict):
            return f"must be a section with a type (value {shown(detail['input'])}); valid types: {few(kinds)}"
        return f"this key is required; valid: {few(kinds)}"
    tag = detail["input"].get("type") if isinstance(detail["input"], dict) else detail["input"]
    return f"unknown type (value {shown(tag)}){nearest(str(tag), kinds)}"


def unknown_key(path: KeyPath, value: Any, data: Any, root: type[Section]) -> str:
    """Return the message about an unknown key: where it belongs, or which key was meant."""
    key = str(path[-1])
    alternatives = kinds_with(root, path[:-1], key)
    if alternatives:
        return f"not used by this type (value {shown(value)}); it is a key of {few(alternatives)}"
    elsewhere = foreign_advice(path) or (FOREIGN_OPTIONS.get(key, "") if len(path) == 1 else "")
    if elsewhere:
        return f"not a key here (value {shown(value)}); {elsewhere}"
    if places := _places(root, key):
        outermost = " at the top level" if places == [key] else ""
        named = " or ".join(places[:MOST_SUGGESTIONS])
        return f"unknown key (value {shown(value)}); did you mean '{named}'{outermost}?"
    return f"unknown key (value {shown(value)}){nearest(key, _siblings(path, data, root))}"


def intended_path(path: KeyPath, data: Any, root: type[Section]) -> KeyPath | None:
    """Return the path of the key that an unknown key probably means; None if there is none or several."""
    key = str(path[-1]) if path else ""
    if not key or fields_at(root, path, data):
        return None
    if places := _places(root, key):
        return tuple(places[0].split(".")) if len(places) == 1 else None
    close = difflib.get_close_matches(key[:LONGEST_PART], _siblings(path, data, root), n=1, cutoff=CLOSE)
    return (*path[:-1], close[0]) if close else None


def unknown_paths(error: ValidationError, data: Any, others: Container[KeyPath]) -> list[KeyPath]:
    """Return the paths of all keys that the schema does not have, without ``others``."""
    details = [detail for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
    paths = dict.fromkeys(_key_path(detail, data) for detail in details)
    return [path for path in paths if path not in others]


def _places(root: type[Section], key: str) -> list[str]:
    return [] if key == "type" else key_paths(root, key)


def _siblings(path: KeyPath, data: Any, root: type[Section]) -> list[str]:
    return [name for section in sections_at(root, path[:-1], data) for name in section_fields(section)]
