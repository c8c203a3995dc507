"""What becomes of a key of MindFormers: the language that the key tables beside this file are written in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from mindllm.config.reading.document import KeyPath

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
