"""All key tables as one, and what they say to somebody who writes such a key in a YAML of ours."""

from __future__ import annotations

from dataclasses import replace

from mindllm.config.reading.document import KeyPath
from mindllm.mindformers.keys.data import DATA
from mindllm.mindformers.keys.model import MODEL
from mindllm.mindformers.keys.parallel import PARALLEL
from mindllm.mindformers.keys.rules import Outcome, Table, rule_for
from mindllm.mindformers.keys.run import RUN
from mindllm.mindformers.keys.update import UPDATE


def _full_targets(table: Table, section: str) -> Table:
    """Targets in a section's table are written without the section."""
    return {
        key: replace(rule, target=f"{section}.{rule.target}") if rule.target and "." not in rule.target else rule
        for key, rule in table.items()
    }


KEYS: Table = {**RUN, **PARALLEL, **UPDATE, **DATA, **_full_targets(MODEL, "model.model_config")}
"""Every key of MindFormers that is known, dotted, and what becomes of it."""


def instead_of(path: KeyPath) -> str:
    """What to do about a key of MindFormers in a YAML of ours; nothing for a key that it does not have either."""
    rule = rule_for(KEYS, path)
    if rule is None:
        return ""
    if rule.target:
        return f"write {rule.target}"
    if rule.outcome is Outcome.WITHOUT_EFFECT:
        return f"remove it: {rule.reason}"
    return f"it is not part of mindllm: {rule.reason}" if rule.reason else ""
