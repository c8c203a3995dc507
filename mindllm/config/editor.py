"""The JSON Schema (draft 7) of a run's YAML: editors mark what loading would refuse.

Pydantic describes a complete run. A file may leave keys to its ``base``, to a model directory or to the command line, so no
section requires its keys. Entries of lists do, because lists are replaced as a whole. A section whose keys depend on ``type``
is checked against that type; without ``type`` it may have the keys of any type. Checks that involve several keys (layers and
stages, batch size and replicas) run when the file is loaded.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from mindllm.config.reading.document import KeyPath
from mindllm.config.reading.foreign import registered_readers
from mindllm.config.reading.load import SYNONYMS
from mindllm.config.reading.schema import section_fields, sections_at, sections_in, walk
from mindllm.config.run import RunConfig
from mindllm.config.section import Section

Schema = dict[str, Any]

REFERENCE = "#/definitions/{model}"
START = REFERENCE.format(model="")
UNUSED = ("title", "discriminator")  # a title is the key in other letters


@cache
def run_sections() -> tuple[Schema, dict[str, Schema]]:
    """Return the properties of the top level, and all sections by the names of their classes."""
    schema = RunConfig.model_json_schema(by_alias=True, ref_template=REFERENCE)
    raw = schema.pop("$defs")
    entries = set(_entries(raw))
    sections = {name: _section(section, raw, name in entries) for name, section in raw.items()}
    return _section(schema, raw, False)["properties"], sections


def referred(schema: Schema) -> str:
    """Return the name of the section that a schema is a reference to; else nothing."""
    return str(schema.get("$ref", "")).removeprefix(START)


def _section(raw: Schema, sections: dict[str, Schema], is_entry: bool) -> Schema:
    """Return the schema of a section. ``null`` is a section with every line commented out."""
    properties = {key: _key(value, sections) for key, value in raw["properties"].items()}
    section = {"type": ["object", "null"], "properties": properties, "additionalProperties": False}
    return {**section, "required": raw["required"]} if is_entry and "required" in raw else section


def _key(raw: Schema, sections: dict[str, Schema]) -> Schema:
    """Return the schema of a key, with its description as text and as Markdown."""
    described: Schema = {key: raw[key] for key in ("description", "default") if key in raw}
    if "`" in described.get("description", ""):
        described["markdownDescription"] = described["description"]
    value = _value({key: value for key, value in raw.items() if key not in described}, sections)
    return {**described, "allOf": [value]} if "$ref" in value else {**described, **value}


def _value(raw: Schema, sections: dict[str, Schema], is_entry: bool = False) -> Schema:
    value = {key: content for key, content in raw.items() if key not in UNUSED}
    if "items" in value:
        value["items"] = _value(value["items"], sections, is_entry=True)
    for word in ("oneOf", "anyOf"):
        if word in value:
            value.update(_alternatives(value.pop(word), sections, is_entry))
    return value


def _alternatives(raw: list[Schema], sections: dict[str, Schema], is_entry: bool) -> Schema:
    """Return the schema of several forms; sections with a ``type`` become one form."""
    kinds = {_kind(referred(form), sections): referred(form) for form in raw if _kind(referred(form), sections)}
    forms_without_type = [_value(form, sections, is_entry) for form in raw if not _kind(referred(form), sections)]
    forms = [*([_choice(kinds, sections, is_entry)] if kinds else []), *forms_without_type]
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _kind(name: str, sections: dict[str, Schema]) -> str:
    return sections[name]["properties"].get("type", {}).get("const", "") if name else ""


def _choice(kinds: dict[str, str], sections: dict[str, Schema], is_entry: bool) -> Schema:
    """Return the schema of a section that is selected by ``type``; without ``type``, which its base may have, any section."""
    words = ("type", *(word for name in kinds.values() for word in _type_synonyms(name)))
    words = (*dict.fromkeys(words),)
    descriptions = [
        f"{kind}: {sections[name]['properties']['type'].get('description', '')}" for kind, name in kinds.items()
    ]
    choice: Schema = {
        "type": "object",
        "properties": {"type": {"enum": [*kinds], "description": "\n".join(descriptions)}},
        "allOf": [
            {
                "if": {"properties": {word: {"const": kind}}, "required": [word]},
                "then": {"$ref": REFERENCE.format(model=name)},
            }
            for word in words
            for kind, name in kinds.items()
        ],
    }
    choice["properties"] |= {word: {"enum": [*kinds], "description": "Another name of `type`."} for word in words[1:]}
    if is_entry:
        return {**choice, "required": ["type"]}
    any_kind = {"properties": _merged_keys(kinds.values(), sections), "additionalProperties": False}
    has_type = {"anyOf": [{"required": [word]} for word in words]} if words[1:] else {"required": ["type"]}
    return {**choice, "if": has_type, "else": any_kind}


def _type_synonyms(name: str) -> list[str]:
    """Return the synonyms of ``type`` in this section."""
    return [
        word
        for path, words in SYNONYMS.items()
        for word, ours in words.items()
        if ours == "type" and name in {section.__name__ for section in sections_at(RunConfig, path)}
    ]


def _merged_keys(names: Any, sections: dict[str, Schema]) -> dict[str, Schema]:
    """Return the keys of all these sections. A key of several sections accepts the form of any."""
    found: dict[str, list[Schema]] = {}
    for name in names:
        for key, raw in sections[name]["properties"].items():
            value = _key(raw, sections)
            if key != "type" and value not in found.setdefault(key, []):
                found[key].append(value)
    keys = {}
    for key, forms in found.items():
        descriptions = [{"description": form["description"]} for form in forms if "description" in form][:1]
        if forms:
            keys[key] = forms[0] if len(forms) == 1 else {**(descriptions[0] if descriptions else {}), "anyOf": forms}
    return keys


def _entries(node: Any) -> Any:
    """Yield the names of sections that are entries of lists."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "items":
            yield from (referred(form) for form in (value, *value.get("oneOf", ())) if referred(form))
        yield from _entries(value)


DRAFT = "http://json-schema.org/draft-07/schema#"
BASE = (
    "YAML that is read first, relative to this file, or below `configs/` of mindllm; this file changes it, key by key."
)


def run_schema(version: str) -> Schema:
    """Return the JSON Schema of the YAMLs of mindllm that :func:`mindllm.config.load_config` reads."""
    top, sections = deepcopy(run_sections())
    places: list[tuple[KeyPath, type[Section]]] = [((), RunConfig)]
    places += [(path, section) for path, info, _ in walk(RunConfig) for section in sections_in(info.annotation)]
    for path, section in places:
        properties = sections[section.__name__]["properties"] if path else top
        for name, ours in SYNONYMS.get(path, {}).items():
            same = {key: value for key, value in properties.get(ours, {}).items() if "escription" not in key}
            properties.setdefault(name, described(f"Hugging Face's name of `{ours}`.", same))
        _add_refused(properties, path)
    return {
        "$schema": DRAFT,
        "$id": "urn:mindllm:run",
        "title": "A run of mindllm",
        "version": version,
        "description": "Written by `mindllm schema` from the schema that loads the YAML.",
        "type": "object",
        "properties": {"base": described(BASE, {"type": "string"}), **top},
        "additionalProperties": False,
        "definitions": sections,
    }


def described(text: str, schema: Schema) -> Schema:
    """Return ``schema`` with a description, and as Markdown if it has markup."""
    return {"description": text, **({"markdownDescription": text} if "`" in text else {}), **schema}


def _add_refused(properties: dict[str, Schema], path: KeyPath) -> None:
    """Mark the keys of other programs as refused, with what to write instead."""
    keys = {key for kind in sections_at(RunConfig, path) for key in section_fields(kind)}  # of this type or another
    for reader in registered_readers():
        for name, advice in reader.section_keys(path).items():
            if name not in keys and name not in properties:
                properties[name] = {"deprecationMessage": advice, "not": {}, "doNotSuggest": True}
