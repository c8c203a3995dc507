"""Command line options that change keys of the YAML: ``--a.b.c=value``, ``--a.b.c value``, ``--flag`` for true.

Every command with such options reads them here, with the same :data:`~mindllm.shorthands.SHORTHANDS`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any

from mindllm.arguments import Overrides as Overrides
from mindllm.config.reading.document import Document, KeyPath, Origin, Problem, child
from mindllm.config.reading.schema import default_list, fields_at, scalar_types
from mindllm.config.reading.yaml_tree import DEEPEST, read_value, unusable_value
from mindllm.config.section import Section
from mindllm.errors import LONGEST_PART, UserError, bounded, few, text_of
from mindllm.outside import TOO_DEEP, half_surrogate, is_deeper
from mindllm.shorthands import IGNORE_UNKNOWN_KEYS, SHORTHANDS


def override_document(overrides: Overrides, base: Document, root: type[Section]) -> Document:
    """Return the overrides as a document to merge into ``base``. Entries of lists are selected by index or ``type``."""
    document = Document()
    for key, value, option in _pairs(overrides):
        origin = Origin(option=option)
        name, inside, _ = key.partition(".")
        if inside and name not in base.data and (entries := default_list(root, name)):
            base.data[name] = entries  # the option changes an entry of the default list
        if key.count(".") > DEEPEST:
            document.problems.append(Problem(origin, (key,), f"no key has more than {DEEPEST} levels"))
            continue
        path, problem = _resolve(key, base.data, origin)
        if problem:
            document.problems.append(problem)
            continue
        if isinstance(value, str) and option.startswith("--"):
            value = _parse(value, path, base, root, option)
        if unusable := unusable_value(value):
            document.problems.append(Problem(origin, path, unusable))
            continue
        _place(document, path, value, origin, base)
    return document


def ignores_unknown(overrides: Overrides) -> bool:
    """Return True if ``--ignore-unknown-keys`` (``ignore_unknown_keys`` of a mapping) is set."""
    if isinstance(overrides, Mapping):
        values = [value for key, value in overrides.items() if _is_ignore_unknown(key)]
    else:
        values = [word.partition("=")[2] or True for word in overrides if _is_ignore_unknown(word)]
    value = str(values[-1] if values else False).lower()
    if value not in ("true", "false"):
        raise UserError(f"{IGNORE_UNKNOWN_KEYS}: must be true or false (value {values[-1]})")
    return value == "true"


def _is_ignore_unknown(word: Any) -> bool:
    name = str(word).partition("=")[0].removeprefix("--")
    return f"--{name.replace('_', '-')}" == IGNORE_UNKNOWN_KEYS


def split_overrides(overrides: Overrides, belongs: Callable[[str], bool]) -> tuple[Overrides, Overrides]:
    """Return the overrides whose dotted key ``belongs``, and the other ones."""
    if isinstance(overrides, Mapping):
        chosen = {key: value for key, value in overrides.items() if belongs(key)}
        return chosen, {key: value for key, value in overrides.items() if key not in chosen}
    parts: dict[bool, list[str]] = {True: [], False: []}
    for key, value, _ in _pairs(overrides):
        parts[belongs(key)].append(f"--{key}" if value is True else f"--{key}={value}")
    return parts[True], parts[False]


def _pairs(overrides: Overrides) -> list[tuple[str, Any, str]]:
    """Return key, value (text as written; ``True`` for a bare flag) and the option as errors quote it."""
    if isinstance(overrides, Mapping):
        if is_deeper(overrides):
            raise UserError(f"overrides: {TOO_DEEP}")
        return [
            (key, value, f"override {key}={text_of(value)}")
            for key, value in overrides.items()
            if not _is_ignore_unknown(key)
        ]
    pairs: list[tuple[str, Any, str]] = []
    waiting = [word for word in overrides if not _is_ignore_unknown(word)]
    while waiting:
        option = waiting.pop(0)
        if any(map(half_surrogate, [option, *waiting[:1]])):
            raise UserError(f"{bounded(option, LONGEST_PART)}: holds bytes that are not UTF-8")
        name, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not name:
            raise UserError(f"{bounded(option, LONGEST_PART)}: not an option; write --section.key=value")
        name = SHORTHANDS.get(name, name)
        if equals:
            pairs.append((name, value, option))
        elif waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
            pairs.append((name, value, f"{option} {value}"))
        else:
            pairs.append((name, True, option))
    return pairs


def _resolve(key: str, data: Any, origin: Origin) -> tuple[KeyPath, Problem | None]:
    """Return the path of a dotted key. In a list, an index or the ``type`` of an entry selects the entry."""
    path: KeyPath = ()
    for part in key.split("."):
        step: str | int = part
        if isinstance(data, list):
            types = [str(entry.get("type")) if isinstance(entry, dict) else "" for entry in data]
            indices = [*range(len(data))] if not part.isdigit() else [int(part)]
            matches = [index for index in indices if index < len(data) and (part.isdigit() or types[index] == part)]
            if not matches:
                message = f"the list has no entry '{part}'; it has {len(data)}: {few(types, part)}"
                return path, Problem(origin, (*path, part), message)
            step = matches[0]
            data = data[step]
        else:
            data = data.get(part) if isinstance(data, dict) else None
        path = (*path, step)
    return path, None


def _parse(text: str, path: KeyPath, base: Document, root: type[Section], option: str) -> Any:
    """Parse ``text`` as YAML, unless the key takes text: a prompt or a path needs no quotes."""
    kinds = {kind for info in fields_at(root, path, base.data) for kind in scalar_types(info.annotation)}
    if str not in kinds:
        return read_value(text, option)
    if text.startswith(("[", '"', "'")):
        try:
            return read_value(text, option)
        except UserError:
            return text
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return None if NoneType in kinds and text == "null" else text


def _place(document: Document, path: KeyPath, value: Any, origin: Origin, base: Document) -> None:
    """Write ``value`` at ``path``. A list on the way is first copied from ``base`` with its origins."""
    node: Any = document.data
    existing: Any = base.data
    for depth, key in enumerate(path[:-1]):
        inner_path = path[: depth + 1]
        existing = child(existing, key)
        inner = child(node, key)
        if not isinstance(inner, dict | list):
            inner = copy.deepcopy(existing) if isinstance(existing, list) else {}
            node[key] = inner
        if isinstance(existing, list):
            document.origins.update({other: o for other, o in base.origins.items() if other[: depth + 1] == inner_path})
        elif inner_path not in base.origins:
            document.origins.setdefault(inner_path, origin)
        node = inner
    node[path[-1]] = value
    document.origins.update(dict.fromkeys(_inside(value, path), origin))


def _inside(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield ``path`` and the paths of all keys in a section."""
    yield path
    for key, entry in value.items() if isinstance(value, dict) else ():
        yield from _inside(entry, (*path, key))
