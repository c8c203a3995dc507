"""Learning rates of groups of weights in MindFormers: ``grouped_lr_schedule``, whose ``default`` replaces ``lr_schedule``.

A group names weights by parts of their names or by shell patterns (``trainer/optimizer_grouped_parameters.py``, 2.1). Those of
embedding, head and final norm are found by their names of mcore; those of layers are called otherwise from network to network.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

from mindllm.config.reading.document import Document, KeyPath
from mindllm.mindformers.keys.rules import Outcome
from mindllm.mindformers.keys.update import UPDATE
from mindllm.mindformers.reading import Reading
from mindllm.mindformers.weight_names import LAYER, MCORE

SECTION, SCHEDULE = "grouped_lr_schedule", "lr_schedule"
OUTSIDE = {origin.name: ours for ours, origin in MCORE.items() if LAYER not in ours}
BEGINNINGS = tuple(name.split(".")[0] for name in OUTSIDE if not name.startswith("decoder."))
FINAL_NORM = "decoder.final_layernorm"


def translate_groups(reading: Reading, translate: Callable[[Reading], None]) -> None:
    """Translates the section where it is written; ``translate`` translates ``lr_schedule`` of a document."""
    default, groups = reading.get(f"{SECTION}.default"), reading.get(f"{SECTION}.grouped")
    if isinstance(default, dict):
        if isinstance(given := reading.get(SCHEDULE), dict):
            for key in given:
                reading.idle(f"{SCHEDULE}.{key}", f"{SECTION}.default decides")
        reading.put(SCHEDULE, _translated(reading, (SECTION, "default"), default, translate), (SECTION, "default"))
    elif default is not None:
        reading.refuse(f"{SECTION}.default", "the schedule of weights without a group is a section")
    if not isinstance(groups, list):
        return
    ours = []
    for number, group in enumerate(groups):
        path = (SECTION, "grouped", number)
        if not isinstance(group, dict):
            reading.note(path, Outcome.REFUSED, reason="a group is a section with params and a schedule")
            continue
        schedule = _translated(reading, path, group, translate)
        ours.append({**schedule, "params": _weights(reading, (*path, "params"), group.get("params"))})
    reading.put(f"{SECTION}.grouped", ours, (SECTION, "grouped"))


def _translated(
    reading: Reading, path: KeyPath, schedule: dict[str, Any], translate: Callable[[Reading], None]
) -> dict[str, Any]:
    """A schedule as ours has it; what became of its keys is noted at ``path``."""
    inner = Reading(Document({SCHEDULE: {key: value for key, value in schedule.items() if key != "params"}}))
    for key in schedule:
        rule = UPDATE.get(f"{SCHEDULE}.{key}")
        if rule is None and key != "params":
            reading.note((*path, key), Outcome.REFUSED, reason=f"no key of {SCHEDULE}")
        elif rule is not None and rule.outcome is Outcome.REFUSED:
            inner.refuse(f"{SCHEDULE}.{key}", rule.reason)
        elif rule is not None and not rule.decided:
            inner.use(f"{SCHEDULE}.{key}")
    translate(inner)
    for (_, *below), entry in inner.entries.items():
        if below[0] in schedule:
            reading.note((*path, *below), entry.outcome, entry.becomes, entry.reason)
    found: dict[str, Any] = inner.ours.data.get(SCHEDULE, {})
    return found


def _weights(reading: Reading, path: KeyPath, patterns: Any) -> list[str]:
    """Our names of the weights that their patterns match."""
    listed = patterns if isinstance(patterns, list) else []
    found = []
    for pattern in map(str, listed):
        names = [ours for theirs, ours in OUTSIDE.items() if pattern in theirs or fnmatch(theirs, pattern)]
        if not names or not pattern.startswith((*BEGINNINGS, FINAL_NORM)):
            reason = (
                f"weights of layers have other names here; write grouped_lr_schedule in a YAML of mindllm ({pattern})"
            )
            reading.note(path, Outcome.REFUSED, reason=reason)
            return []
        found += names
    reading.note(path, Outcome.TRANSLATED, f"params: {found}")
    return found
