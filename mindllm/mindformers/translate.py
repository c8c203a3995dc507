"""A document of MindFormers into one of ours: first the keys that depend on others, then the tables, key by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindllm.config.reading.document import Document, KeyPath, Problem, closest_origin, dotted, leaves
from mindllm.errors import MOST_SHOWN, nearest
from mindllm.mindformers.architecture import translate_architecture
from mindllm.mindformers.directory import read_directory
from mindllm.mindformers.keys.rules import Outcome, Rule, is_section, pattern_of, places, rule_for, siblings
from mindllm.mindformers.keys.tables import KEYS, drop_unread
from mindllm.mindformers.layer_settings import place_layers_ahead, translate_row_parts, translate_swap
from mindllm.mindformers.mesh import translate_mesh
from mindllm.mindformers.monitoring import translate_monitor
from mindllm.mindformers.reading import Reading, shown
from mindllm.mindformers.recomputation import translate_recomputation
from mindllm.mindformers.session import translate_session
from mindllm.mindformers.text import translate_text
from mindllm.mindformers.update import is_of_watcher, translate_update
from mindllm.shorthands import IGNORE_UNKNOWN_KEYS

NETWORK_KEYS = (
    "model",
    "model.arch.type",
    *(f"{at}.{name}" for at in ("model", "model.model_config") for name in ("architectures", "model_type")),
)
SUBJECTS: tuple[Callable[[Reading], Any], ...] = (
    translate_mesh,
    translate_architecture,
    place_layers_ahead,
    translate_row_parts,
    translate_recomputation,
    translate_swap,
    translate_update,
    translate_text,
    translate_session,
    translate_monitor,
)


def translate(theirs: Document, as_written: bool = False, ignore_unknown: bool = False) -> Reading:
    """Translate a whole document. Mistakes and refusals are part of the result, nothing is raised.

    Args:
        as_written: take keys that MindFormers itself ignores at their word.
        ignore_unknown: report unknown keys as warnings, not as mistakes.
    """
    reading = Reading(theirs, as_written, ignore_unknown)
    drop_unread(reading)
    read_directory(reading)
    _plain_keys(reading)
    for subject in SUBJECTS:
        subject(reading)
    for path, value in leaves(theirs.data):
        if not reading.claimed(path) and not _is_unknown(reading, path):
            _remaining(reading, path, value)
    if "device_target" not in reading.ours.data.get("context", {}):
        reading.left_out(
            "context.device_target", "context.device_target", "Ascend", "left out: the default of MindFormers"
        )
    reading.ours.problems = [*theirs.problems, *reading.unknown.values(), *_wrong_values(reading)]
    return reading


def _plain_keys(reading: Reading) -> None:
    """The keys that a table decides alone."""
    for path, value in leaves(reading.theirs.data):
        rule = rule_for(KEYS, path)
        if rule is None:
            if not (_is_unknown(reading, path) or _is_empty_section(path, value) or is_of_watcher(reading, path)):
                _report_unknown(reading, path)
        elif not rule.decided and not reading.claimed(path):
            _plain(reading, path, value, rule)


def _plain(reading: Reading, path: KeyPath, value: Any, rule: Rule) -> None:
    if rule.outcome is Outcome.REFUSED:
        if value is None or value == "":
            reading.note(path, Outcome.WITHOUT_EFFECT, reason="empty")
        else:
            reading.note(path, Outcome.REFUSED, reason=rule.reason)
    elif rule.outcome is Outcome.WITHOUT_EFFECT:
        if not rule.only or value in rule.only:
            reading.note(path, Outcome.WITHOUT_EFFECT, reason=rule.reason)
        else:
            reading.note(path, Outcome.REFUSED, reason=rule.otherwise)
    elif value is None:
        reading.note(path, Outcome.WITHOUT_EFFECT, reason="empty")
    else:
        _carry(reading, path, value, rule)


def _carry(reading: Reading, path: KeyPath, value: Any, rule: Rule) -> None:
    """A key that is used or moved; two names of one key must agree."""
    target = rule.target or dotted(path)
    present = _value_at(reading.ours.data, target)
    if present is not None and present != value:
        message = f"another name of {target}, which is given too (value {shown(present)}); keep one"
        reading.unknown[path] = Problem(closest_origin(reading.theirs.origins, path), path, message)
        return
    reading.put(target, value, path)
    if rule.outcome is Outcome.USED:
        reading.note(path, Outcome.USED, reason=rule.reason)
    else:
        reading.note(path, Outcome.TRANSLATED, f"{target}: {shown(value)}", rule.reason)


def _value_at(data: Any, target: str) -> Any:
    for part in target.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _remaining(reading: Reading, path: KeyPath, value: Any) -> None:
    """What no subject has claimed: an empty section, or a key of a form that it does not have there."""
    if _is_empty_section(path, value):
        reading.note(path, Outcome.WITHOUT_EFFECT, reason="empty")
    else:
        reading.note(path, Outcome.WITHOUT_EFFECT, reason="what it belongs to is not given")


def _is_empty_section(path: KeyPath, value: Any) -> bool:
    return value in (None, {}, []) and is_section(KEYS, path)


def _is_unknown(reading: Reading, path: KeyPath) -> bool:
    return any(path[:length] in reading.unknown for length in range(1, len(path) + 1)) or (
        reading.ignore_unknown and rule_for(KEYS, path) is None and reading.claimed(path)
    )


def _report_unknown(reading: Reading, path: KeyPath) -> None:
    """Add the mistake, or the warning, of a key that MindFormers does not have, at the outermost name that is wrong."""
    for length in range(1, len(path) + 1):
        here = path[:length]
        if not (isinstance(here[-1], int) or is_section(KEYS, here) or rule_for(KEYS, here) is not None):
            break
    origin = closest_origin(reading.theirs.origins, here)
    if reading.ignore_unknown:
        reading.has_ignored_keys = True
        reading.note(
            here, Outcome.WITHOUT_EFFECT, reason=f"unknown key of MindFormers, ignored ({IGNORE_UNKNOWN_KEYS})"
        )
        reading.warnings.append(f"{origin}: {dotted(here)}: unknown key of MindFormers, ignored")
        return
    value = _value_at_path(reading.theirs.data, here)
    text = "" if isinstance(value, dict | list) else f" (value {shown(value)})"
    hint = _similar_key(here) if len(reading.unknown) < MOST_SHOWN else ""
    reading.unknown[here] = Problem(origin, here, f"unknown key of MindFormers{text}{hint}")


def _similar_key(path: KeyPath) -> str:
    name = pattern_of(path).rpartition(".")[2]
    elsewhere = [] if name == "type" else places(KEYS, name)
    return f"; did you mean '{elsewhere[0]}'?" if elsewhere else nearest(name, siblings(KEYS, path))


def _value_at_path(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data


def _wrong_values(reading: Reading) -> list[Problem]:
    """The refusals, one line for all keys that are refused for the same reason."""
    by_reason: dict[str, list[Any]] = {}
    network_first = sorted(reading.entries.values(), key=lambda entry: entry.key not in NETWORK_KEYS)
    for entry in network_first:
        if entry.outcome is Outcome.REFUSED:
            by_reason.setdefault(entry.reason, []).append(entry)
    problems = []
    for reason, entries in by_reason.items():
        first, others = entries[0], len(entries) - 1
        value = "" if isinstance(first.value, dict) else f" (value {shown(first.value)})"
        more = f"; and {others} more such keys" if others else ""
        problems.append(Problem(first.origin, first.path, f"{reason}{value}{more}"))
    return problems
