"""Renders the schema as Markdown: one table per section, one row per key."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mindllm.config import RunConfig
from mindllm.config.reading.load import SYNONYMS
from mindllm.config.reading.problems import shown
from mindllm.config.reading.schema import section_fields, section_type, sections_in
from mindllm.config.recompute import COUNTS_FORM, SELECTION_FORM, LayerCounts, LayerSelection
from mindllm.config.section import Section
from mindllm.mindformers.reader import KEYS
from mindllm.mindformers.reading import Rule

INTRODUCTION = """\
# Configuration reference

Every key of a run's YAML. Written by `python -m toolkit.config_reference` from `mindllm/config/`; do not edit it.

- `base: ../base/pretrain.yaml` at the top of a file reads that file first; the file itself then changes it, key by key. A list is
  replaced as a whole, and a section whose `type` changes starts afresh.
- On the command line, `--section.key=value` changes any key; an entry of a list goes by its number or its `type`, as in
  `--callbacks.CheckpointMonitor.save_checkpoint_steps=50`.
- An unknown key, a wrong type or an impossible combination is an error that names the file, the line and what to write instead.
"""
WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "null"}
FORMS = {LayerCounts: COUNTS_FORM, LayerSelection: SELECTION_FORM}  # shorter than their types spelled out
COPIES = ("train_dataset_task.dataset_config.", "eval_dataset.", "eval_dataset_task.dataset_config.")
TABLE_HEAD = "| key | type | default | description |\n|---|---|---|---|"


def render_page() -> str:
    """Returns the whole page."""
    parts = [INTRODUCTION, *_section((), RunConfig, "Top level"), _synonyms(), _theirs()]
    return "\n".join(parts).rstrip() + "\n"


def _section(path: tuple[str, ...], section: type[Section], title: str) -> list[str]:
    """The table of a section, then those of the sections inside it."""
    rows, inner = [], []
    for name, info in sorted(section_fields(section).items(), key=lambda item: item[0] != "type"):
        rows.append(_row(name, info))
        alternatives = sections_in(info.annotation)
        for alternative in alternatives:
            heading = f"`{'.'.join((*path, name))}`"
            if len(alternatives) > 1:
                heading += f" with `type: {section_type(alternative)}`"
            inner += _section((*path, name), alternative, heading)
    return [f"## {title}", "", TABLE_HEAD, *rows, "", *inner]


def _row(name: str, info: FieldInfo) -> str:
    cells = [f"`{name}`", _type(info.annotation) + _limits(info), _default(info), info.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any) -> str:
    """A type in words."""
    if annotation in FORMS:
        return FORMS[annotation]
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin is tuple:
        return f"list of {_type(arguments[0])}" if arguments[-1] is Ellipsis else f"list of {len(arguments)}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return WORDS[annotation]


def _limits(info: FieldInfo) -> str:
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [f"{word} {getattr(m, sign):g}" for m in info.metadata for sign, word in names.items() if hasattr(m, sign)]
    return f" ({', '.join(limits)})" if limits else ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default is PydanticUndefined:
        return ""  # a section with its own table, or a value that follows from others
    return f"`{_value(info.default)}`" if info.default != "" else "empty"


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return shown(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return value.type if isinstance(value, BaseModel) and hasattr(value, "type") else str(value)


def _synonyms() -> str:
    rows = [
        f"| `{'.'.join(map(str, section))}` | `{theirs}` | `{ours}` |"
        for section, names in SYNONYMS.items()
        for theirs, ours in names.items()
    ]
    return "\n".join(
        ["## Hugging Face names that are accepted", "", "| section | name | key |", "|---|---|---|", *rows, ""]
    )


def _theirs() -> str:
    """The key tables of MindFormers; sections that are copies of another, or another form of it, are left out."""
    rows = [
        f"| `{key}` | {rule.outcome.value} | {_becomes(key, rule)} |"
        for key, rule in KEYS.items()
        if not key.startswith(COPIES) and not (key.startswith("model.") and key.count(".") == 1)
    ]
    heading = (
        "## Keys of MindFormers\n\nWhat becomes of a YAML of MindFormers: [mindformers_yaml.md](mindformers_yaml.md)."
    )
    return "\n".join([heading, "", "| key | | here |", "|---|---|---|", *rows, ""])


def _becomes(key: str, rule: Rule) -> str:
    target = f"`{rule.target}`" if rule.target and rule.target != key else ""
    values = f"{' or '.join(map(shown, rule.only))}; else refused: {rule.otherwise}" if rule.only else rule.reason
    return ": ".join(part for part in (target, values.replace("|", "\\|")) if part)
