"""The JSON Schema of a run's YAML, for editors: what is refused when it is loaded is marked while it is written.

What depends on several keys (layers and stages, a batch and its copies) is not in it: that is judged when the file is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from mindllm.config.editor.sections import Schema, run_sections
from mindllm.config.reading.document import KeyPath
from mindllm.config.reading.foreign import registered_readers
from mindllm.config.reading.load import FORMER, SYNONYMS, WORDS
from mindllm.config.reading.schema import fields_of, sections_at, sections_in, walk
from mindllm.config.run import RunConfig
from mindllm.config.section import Section

DRAFT = "http://json-schema.org/draft-07/schema#"
BASE = (
    "YAML that is read first, relative to this file, or below `configs/` of mindllm; this file changes it, key by key."
)


def run_schema(version: str) -> Schema:
    """Return the JSON Schema of the YAMLs that :func:`mindllm.config.load_config` reads, but for those of MindFormers."""
    top, sections = deepcopy(run_sections())
    for path, section in _places():
        properties = sections[section.__name__]["properties"] if path else top
        _add_words(properties, path)
        _add_other_names(properties, path)
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
    """``schema`` with a description, and the same as Markdown where it has some."""
    return {"description": text, **({"markdownDescription": text} if "`" in text else {}), **schema}


def _places() -> Iterator[tuple[KeyPath, type[Section]]]:
    """Yield every section with its path."""
    yield (), RunConfig
    for path, info, _ in walk(RunConfig):
        for section in sections_in(info.annotation):
            yield path, section


def _add_words(properties: dict[str, Schema], path: KeyPath) -> None:
    """Other words for values."""
    for key, words in WORDS.items():
        if key[:-1] == path:
            value = properties[str(key[-1])]
            value["enum"] = [*value["enum"], *words]


def _add_other_names(properties: dict[str, Schema], path: KeyPath) -> None:
    """The names that Hugging Face has, and those that were."""
    for name, ours in SYNONYMS.get(path, {}).items():
        same = {key: value for key, value in properties.get(ours, {}).items() if "escription" not in key}
        properties.setdefault(name, described(f"Hugging Face's name of `{ours}`.", same))
    for name, ours in FORMER.get(path, {}).items():
        told = {"deprecated": True, "deprecationMessage": f"a former name; write {ours}", "doNotSuggest": True}
        properties.setdefault(name, {**properties[ours], **told})


def _add_refused(properties: dict[str, Schema], path: KeyPath) -> None:
    """Mark the keys of other programs as refused, with what to write instead."""
    keys = {key for kind in sections_at(RunConfig, path) for key in fields_of(kind)}  # of this type or another
    for reader in registered_readers():
        for name, advice in reader.section_keys(path).items():
            if name not in keys and name not in properties:
                properties[name] = {"deprecationMessage": advice, "not": {}, "doNotSuggest": True}
