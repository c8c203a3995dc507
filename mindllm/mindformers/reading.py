"""The rules of the key tables, and the state of a translation: source, result, and one entry for every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

from mindllm.config.reading.document import Document, KeyPath, Origin, Problem, child, closest_origin, dotted, path_of
from mindllm.config.reading.yaml_tree import inline_yaml

LIST_ENTRY = "[]"


class Outcome(str, Enum):
    """What became of one key."""

    USED = "used"  # the same key, the same value
    TRANSLATED = "translated"  # under another key, or with another value
    WITHOUT_EFFECT = "without effect"  # it does not change the result
    REFUSED = "refused"  # it would change the result and is not supported


@dataclass(frozen=True)
class Rule:
    """A row of a key table.

    Attributes:
        outcome: what becomes of the key.
        target: dotted key of mindllm; empty for the same name.
        reason: the reason that users see.
        only: values without effect; other values are refused with the reason ``otherwise``.
        otherwise: the reason for refused values.
        decided: the key is translated by a function, together with other keys.
    """

    outcome: Outcome
    target: str = ""
    reason: str = ""
    only: tuple[Any, ...] = ()
    otherwise: str = ""
    decided: bool = False


Table = dict[str, Rule]


def used(reason: str = "") -> Rule:
    """Return the rule of a key with the same name and meaning."""
    return Rule(Outcome.USED, reason=reason)


def moved(target: str, reason: str = "") -> Rule:
    """Return the rule of a key with another name."""
    return Rule(Outcome.TRANSLATED, target=target, reason=reason)


def idle(reason: str, instead: str = "") -> Rule:
    """Return the rule of a key without effect; ``instead`` is the key of mindllm that decides."""
    return Rule(Outcome.WITHOUT_EFFECT, target=instead, reason=reason)


def only(*values: Any, reason: str, otherwise: str) -> Rule:
    """Return the rule of a key without effect for ``values`` and refused for other values."""
    return Rule(Outcome.WITHOUT_EFFECT, reason=reason, only=values, otherwise=otherwise)


def refused(reason: str) -> Rule:
    """Return the rule of a key that is refused with any value."""
    return Rule(Outcome.REFUSED, reason=reason)


def decided(target: str = "", reason: str = "") -> Rule:
    """Return the rule of a key that a function translates; ``target`` is what to write instead of it."""
    return Rule(Outcome.TRANSLATED, target=target, reason=reason, decided=True)


def pattern_of(path: KeyPath) -> str:
    """Return a path as the tables write it: dotted, with ``[]`` for entries of lists."""
    return ".".join(LIST_ENTRY if isinstance(key, int) else key for key in path)


def rule_for(table: Table, path: KeyPath) -> Rule | None:
    """Return the row of ``path``, or of the nearest section around it with a row ``section.*``."""
    exact = table.get(pattern_of(path))
    if exact is not None:
        return exact
    for length in range(len(path) - 1, 0, -1):
        around = table.get(f"{pattern_of(path[:length])}.*")
        if around is not None:
            return around
    return None


def is_section(table: Table, path: KeyPath) -> bool:
    """Return True if the table has keys below ``path``."""
    return f"{pattern_of(path)}." in _sections(tuple(table))


def siblings(table: Table, path: KeyPath) -> list[str]:
    """Return the names that may stand next to the last key of ``path``."""
    start = "".join(f"{part}." for part in pattern_of(path).split(".")[:-1]) if len(path) > 1 else ""
    return _sections(tuple(table)).get(start, [])


def places(table: Table, name: str) -> list[str]:
    """Return every dotted key of the table whose last part is ``name``."""
    return [key for key in table if key.rpartition(".")[2] == name]


@cache
def _sections(keys: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the names of the keys in every section, by the section's dotted name with a dot at its end."""
    names: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split(".")
        for length in range(len(parts)):
            names.setdefault("".join(f"{part}." for part in parts[:length]), set()).add(parts[length])
    return {section: sorted(inside - {"*", LIST_ENTRY}) for section, inside in names.items()}


NOTHING = object()
AS_WRITTEN = "--mindformers.ignored_keys=as_written"


@dataclass(frozen=True)
class Entry:
    """Outcome of one key: ``becomes`` is the result (empty: none), ``reason`` the reason."""

    path: KeyPath
    value: Any
    outcome: Outcome
    becomes: str = ""
    reason: str = ""
    origin: Origin | None = None

    @property
    def key(self) -> str:
        """Return the dotted key."""
        return dotted(self.path)


@dataclass
class Reading:
    """A translation in progress: the source, the result, and the entries of translated keys.

    Functions that translate several keys together claim them; the tables do not apply to claimed keys. ``assumed`` are values of
    keys that the YAML leaves to a Hugging Face directory.
    """

    source: Document
    as_written: bool = False
    ignore_unknown: bool = False
    ours: Document = field(default_factory=Document)
    entries: dict[KeyPath, Entry] = field(default_factory=dict)
    unknown: dict[KeyPath, Problem] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    has_ignored_keys: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key in the source; without a value, the ``assumed`` value or ``default``."""
        value: Any = self.source.data
        for part in path_of(key):
            value = child(value, part)
        return self.assumed.get(key, default) if value is None else value

    def number(self, key: str, default: float) -> float:
        """Return their number of at most 64 bits under ``key``, else ``default``: the key's own translation refuses it."""
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number and abs(value) < 2**63 else default

    def count(self, key: str, default: int = 1) -> int:
        """Return the positive integer under ``key``, or ``default``."""
        value = self.number(key, default)
        return value if isinstance(value, int) and value > 0 else default

    def word(self, key: str) -> str:
        """Return the value under ``key`` as text; empty without a value."""
        value = self.get(key, "")
        return value if isinstance(value, str) else shown(value)

    def has(self, key: str) -> bool:
        """Return True if the source has the key."""
        *around, last = path_of(key)
        section: Any = self.source.data
        for part in around:
            section = child(section, part)
        return isinstance(section, dict) and last in section

    def is_open(self, key: str) -> bool:
        """Return True if the source has the key and nothing has claimed it."""
        return self.has(key) and not self.claimed(path_of(key))

    def put(self, key: str, value: Any, source: KeyPath = ()) -> None:
        """Set the dotted ``key`` of the result. Problems with the value name the place of ``source``."""
        path = path_of(key)
        section: Any = self.ours.data
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
        origin = closest_origin(self.source.origins, source)
        if origin is not None:
            self.ours.origins[path] = origin

    def use(self, key: str) -> None:
        """Copy the key and its value to the result."""
        self.put(key, self.get(key), path_of(key))
        self.note(key, Outcome.USED)

    def translate(self, key: str, target: str, value: Any = NOTHING, reason: str = "") -> None:
        """Set ``target`` of the result to the value of the key, or to ``value``."""
        value = self.get(key) if value is NOTHING else value
        self.put(target, value, path_of(key))
        if target == key and value == self.get(key):
            self.note(key, Outcome.USED, reason=reason)
        else:
            self.note(key, Outcome.TRANSLATED, f"{target}: {shown(value)}", reason)

    def idle(self, key: str, reason: str) -> None:
        """Record that the key has no effect."""
        self.note(key, Outcome.WITHOUT_EFFECT, reason=reason)

    def refuse(self, key: str, reason: str) -> None:
        """Record that the key would change the result and is not supported."""
        self.note(key, Outcome.REFUSED, reason=reason)

    def set_omitted(self, key: str, target: str, value: Any, reason: str) -> None:
        """Set a key that the source omits and whose default differs from mindllm."""
        self.put(target, value)
        path = path_of(key)
        self.entries[path] = Entry(path, None, Outcome.TRANSLATED, f"{target}: {shown(value)}", reason)

    def note(self, key: str | KeyPath, outcome: Outcome, becomes: str = "", reason: str = "") -> None:
        """Record the outcome of a key of the source."""
        path = path_of(key) if isinstance(key, str) else key
        value: Any = self.source.data
        for part in path:
            value = child(value, part)
        origin = closest_origin(self.source.origins, path)
        self.entries[path] = Entry(path, value, outcome, becomes, reason, origin)

    def claimed(self, path: KeyPath) -> bool:
        """Return True if ``path``, or a section around it, has an entry."""
        return any(path[:length] in self.entries for length in range(1, len(path) + 1))


def shown(value: Any) -> str:
    """Return a value as YAML writes it, on one line."""
    return inline_yaml(value)
