"""The JSON Schema of a YAML of MindFormers: its keys, and what becomes of each when mindllm reads it."""

from __future__ import annotations

from typing import Any

from mindllm.config.editor import DRAFT, Schema, described, run_sections
from mindllm.config.reading.document import path_of
from mindllm.config.reading.schema import sections_at
from mindllm.config.run import RunConfig
from mindllm.mindformers.reader import KEYS
from mindllm.mindformers.reading import LIST_ENTRY, Outcome, Rule

ANY_KEY = "*"
EMPTY: tuple[Any, ...] = (None, "", {}, [])  # values that a refused key may have


def mindformers_schema(version: str) -> Schema:
    """Return the JSON Schema of the YAMLs of MindFormers that mindllm reads: refused keys and values are marked."""
    tree: dict[str, Any] = {}
    for key, rule in KEYS.items():
        node = tree
        for part in key.split(".")[:-1]:
            node = node.setdefault(part, {})
        node.setdefault(key.rpartition(".")[2], {})[""] = rule
    return {
        "$schema": DRAFT,
        "$id": "urn:mindllm:mindformers",
        "title": "A run of MindFormers, read by mindllm",
        "version": version,
        "description": "Written by `mindllm schema --mindformers` from the tables that translate the YAML.",
        **_section(tree),
        "type": "object",
    }


def _node(key: str, tree: dict[str, Any]) -> Schema:
    """Return the schema of ``key``: a value, a section, or either."""
    rule = tree.get("")
    inner = {name: below for name, below in tree.items() if name}
    if not inner:
        return _value(key, rule) if rule else {}
    section = {"type": ["array", "null"], "items": _section(inner[LIST_ENTRY], key)} if LIST_ENTRY in inner else None
    section = section or _section(inner, key)
    any_key = tree.get(ANY_KEY, {}).get("")
    if rule is None and any_key and any_key.outcome is Outcome.REFUSED:
        return described(_outcome(any_key), _refused(any_key))
    if rule is None and any_key is None:
        return section
    return described(_outcome(rule or any_key), {name: part for name, part in section.items() if name != "type"})


def _section(tree: dict[str, Any], key: str = "") -> Schema:
    named = {name: below for name, below in tree.items() if name not in ("", ANY_KEY, LIST_ENTRY)}
    properties = {name: _node(f"{key}.{name}" if key else name, below) for name, below in named.items()}
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": ANY_KEY in tree}


def _value(key: str, rule: Rule) -> Schema:
    """Return the schema of a value. A value that is copied must be valid for the key of mindllm; ``null`` means unset."""
    schema: Schema = {}
    if rule.outcome is Outcome.REFUSED:
        schema = _refused(rule)
    elif rule.only:
        schema = {"enum": [*dict.fromkeys([*rule.only])], "errorMessage": rule.otherwise}
    elif rule.outcome in (Outcome.USED, Outcome.TRANSLATED) and not rule.decided:
        schema = _or_null(_ours(rule.target or key))
    return described(_outcome(rule), schema)


def _refused(rule: Rule) -> Schema:
    return {"enum": [*EMPTY], "errorMessage": rule.reason, "doNotSuggest": True}


def _or_null(ours: Schema) -> Schema:
    return {"anyOf": [ours, {"type": "null"}]} if ours else {}


def _ours(key: str) -> Schema:
    """Return the schema of a key of mindllm; empty for a section."""
    path = path_of(key)
    sections = sections_at(RunConfig, path[:-1])
    top, definitions = run_sections()
    schemas = [
        (definitions[section.__name__]["properties"] if path[:-1] else top).get(str(path[-1]), {})
        for section in sections
    ]
    schema = schemas[0] if len(schemas) == 1 else {}
    return {} if "$ref" in str(schema) else {name: part for name, part in schema.items() if "escription" not in name}


def _outcome(rule: Rule) -> str:
    """Return the outcome of a key as ``mindllm convert`` reports it."""
    target = f": `{rule.target}`" if rule.target else ""
    values = "; else refused" if rule.only else ""
    return f"{rule.outcome.value.capitalize()}{target}{f': {rule.reason}' if rule.reason else ''}{values}."
