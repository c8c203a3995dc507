"""A YAML of MindFormers on its way into ours: what was read, what it becomes, and one entry for every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindllm.config.reading.document import Document, KeyPath, Origin, Problem, child, closest_origin, dotted, path_of
from mindllm.config.reading.yaml_tree import inline_yaml
from mindllm.mindformers.keys.rules import Outcome

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
