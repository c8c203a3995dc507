"""The language of the key tables, and the state of a translation: what was read, what it becomes, one entry for every key."""

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
    WITHOUT_EFFECT = "without effect"  # it changes nothing of what is computed here
    REFUSED = "refused"  # it would change what is computed, and mindllm does not have it


@dataclass(frozen=True)
class Rule:
    """One row of a key table.

    ``target`` is the dotted key of mindllm (empty: the same), ``reason`` what a user is told. Where ``only`` holds values, other
    ones are refused for the reason ``otherwise``. ``decided`` rows are translated together with other keys, by a function.
    """

    outcome: Outcome
    target: str = ""
    reason: str = ""
    only: tuple[Any, ...] = ()
    otherwise: str = ""
    decided: bool = False


Table = dict[str, Rule]


def used(reason: str = "") -> Rule:
    """The same key with the same meaning."""
    return Rule(Outcome.USED, reason=reason)


def moved(target: str, reason: str = "") -> Rule:
    """The value stands under another key."""
    return Rule(Outcome.TRANSLATED, target=target, reason=reason)


def idle(reason: str, instead: str = "") -> Rule:
    """Without effect here, whatever its value; ``instead`` is the key of ours that decides it."""
    return Rule(Outcome.WITHOUT_EFFECT, target=instead, reason=reason)


def only(*values: Any, reason: str, otherwise: str) -> Rule:
    """Without effect with one of ``values``, refused with any other."""
    return Rule(Outcome.WITHOUT_EFFECT, reason=reason, only=values, otherwise=otherwise)


def refused(reason: str) -> Rule:
    """Refused with any value."""
    return Rule(Outcome.REFUSED, reason=reason)


def decided(target: str = "", reason: str = "") -> Rule:
    """Translated by a function, because it depends on other keys; ``target`` is what to write instead of it."""
    return Rule(Outcome.TRANSLATED, target=target, reason=reason, decided=True)


def pattern_of(path: KeyPath) -> str:
    """A path as the tables write it: dotted, the places of list entries as ``[]``."""
    return ".".join(LIST_ENTRY if isinstance(key, int) else key for key in path)


def rule_for(table: Table, path: KeyPath) -> Rule | None:
    """The row of ``path``: its own, or that of the nearest section around it that is written ``section.*``."""
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
    return [known for known in table if known.rpartition(".")[2] == name]


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
    """What became of one key: ``becomes`` is what stands in ours (empty: nothing), ``reason`` why."""

    path: KeyPath
    value: Any
    outcome: Outcome
    becomes: str = ""
    reason: str = ""
    origin: Origin | None = None

    @property
    def key(self) -> str:
        """The dotted key."""
        return dotted(self.path)


@dataclass
class Reading:
    """Their document, ours as far as it is written, and the entries so far.

    Functions that translate several keys together claim them here; a key that is claimed is not looked up in the tables.
    ``assumed`` are values of keys that the YAML leaves to a Hugging Face directory.
    """

    theirs: Document
    as_written: bool = False
    ignore_unknown: bool = False
    ours: Document = field(default_factory=Document)
    entries: dict[KeyPath, Entry] = field(default_factory=dict)
    unknown: dict[KeyPath, Problem] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    has_ignored_keys: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        """Their value under a dotted key; where there is none, or null, what is ``assumed``, or ``default``."""
        value: Any = self.theirs.data
        for part in path_of(key):
            value = child(value, part)
        return self.assumed.get(key, default) if value is None else value

    def number(self, key: str, default: float) -> float:
        """Return their number of at most 64 bits under ``key``, else ``default``: the key's own translation refuses it."""
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number and abs(value) < 2**63 else default

    def count(self, key: str, default: int = 1) -> int:
        """Their positive integer under ``key``; ``default`` for anything else."""
        value = self.number(key, default)
        return value if isinstance(value, int) and value > 0 else default

    def word(self, key: str) -> str:
        """Their value under ``key`` as a word to look up; empty where there is none."""
        value = self.get(key, "")
        return value if isinstance(value, str) else shown(value)

    def has(self, key: str) -> bool:
        """Whether the key is written."""
        *around, last = path_of(key)
        section: Any = self.theirs.data
        for part in around:
            section = child(section, part)
        return isinstance(section, dict) and last in section

    def left(self, key: str) -> bool:
        """Whether the key is written and nothing has been decided about it."""
        return self.has(key) and not self.claimed(path_of(key))

    def put(self, key: str, value: Any, source: KeyPath = ()) -> None:
        """Writes ``value`` under our dotted ``key``; mistakes found in it later name the place of ``source``."""
        path = path_of(key)
        section: Any = self.ours.data
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
        origin = closest_origin(self.theirs.origins, source)
        if origin is not None:
            self.ours.origins[path] = origin

    def use(self, key: str) -> None:
        """The key and its value stand in ours unchanged."""
        self.put(key, self.get(key), path_of(key))
        self.note(key, Outcome.USED)

    def translate(self, key: str, target: str, value: Any = NOTHING, reason: str = "") -> None:
        """Our ``target`` takes the key's value, or the ``value`` given; the same key with the same value is used."""
        value = self.get(key) if value is NOTHING else value
        self.put(target, value, path_of(key))
        if target == key and value == self.get(key):
            self.note(key, Outcome.USED, reason=reason)
        else:
            self.note(key, Outcome.TRANSLATED, f"{target}: {shown(value)}", reason)

    def idle(self, key: str, reason: str) -> None:
        """The key has no effect here."""
        self.note(key, Outcome.WITHOUT_EFFECT, reason=reason)

    def refuse(self, key: str, reason: str) -> None:
        """The key would change what is computed, and cannot be had."""
        self.note(key, Outcome.REFUSED, reason=reason)

    def left_out(self, key: str, target: str, value: Any, reason: str) -> None:
        """A key that is not written has another default there than here."""
        self.put(target, value)
        path = path_of(key)
        self.entries[path] = Entry(path, None, Outcome.TRANSLATED, f"{target}: {shown(value)}", reason)

    def note(self, key: str | KeyPath, outcome: Outcome, becomes: str = "", reason: str = "") -> None:
        """Records what became of a key that is written."""
        path = path_of(key) if isinstance(key, str) else key
        value: Any = self.theirs.data
        for part in path:
            value = child(value, part)
        origin = closest_origin(self.theirs.origins, path)
        self.entries[path] = Entry(path, value, outcome, becomes, reason, origin)

    def claimed(self, path: KeyPath) -> bool:
        """Whether a function has decided about ``path`` or a section around it."""
        return any(path[:length] in self.entries for length in range(1, len(path) + 1))


def shown(value: Any) -> str:
    """Return a value as YAML writes it, on one line."""
    return inline_yaml(value)
