"""All key tables as one, and what they say to somebody who writes such a key in a YAML of ours.

Public YAMLs write keys that MindFormers does not read: what its runs did is what ours do. They were found in its sources, 1.3
to 2.1: a configuration class takes what it has parameters for, and keeps the rest as attributes that no network looks at. A
legacy Llama's head is always ``hidden_size / num_heads`` wide, and has no dropout.
"""

from __future__ import annotations

from dataclasses import replace

from mindllm.config.reading.document import KeyPath
from mindllm.mindformers.keys.data import DATA
from mindllm.mindformers.keys.model import MODEL
from mindllm.mindformers.keys.pynative import PYNATIVE
from mindllm.mindformers.keys.rules import Outcome, Table, rule_for
from mindllm.mindformers.keys.run import PARALLEL, RUN
from mindllm.mindformers.keys.update import UPDATE
from mindllm.mindformers.reading import AS_WRITTEN, Reading

SECTION = "model.model_config"
UNREAD = {  # class of the configuration: its keys
    "LlamaConfig": ("kv_channels", "rotary_emb_base", "rotary_pct", "emb_dropout_prob"),
    "ChatGLM2Config": ("no_recompute_layers",),
}


def drop_unread(reading: Reading) -> None:
    """Claims the keys that are not read, before anything is made of them; ``as_written`` takes them at their word."""
    if reading.as_written:
        return
    kind = reading.word(f"{SECTION}.type")
    for name in UNREAD.get(kind, ()):
        key = f"{SECTION}.{name}"
        if reading.has(key):
            reading.idle(key, f"{kind} of MindFormers does not read it; {AS_WRITTEN} takes it at its word")


def _full_targets(table: Table, section: str) -> Table:
    """Targets in a section's table are written without the section."""
    return {
        key: replace(rule, target=f"{section}.{rule.target}") if rule.target and "." not in rule.target else rule
        for key, rule in table.items()
    }


KEYS: Table = {**RUN, **PYNATIVE, **PARALLEL, **UPDATE, **DATA, **_full_targets(MODEL, "model.model_config")}
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
