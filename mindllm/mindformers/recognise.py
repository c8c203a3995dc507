"""Whether a YAML is one of MindFormers, and which options of a command line are about theirs."""

from __future__ import annotations

from typing import Any

from mindllm.config.reading.document import Document, KeyPath
from mindllm.config.reading.schema import fields_at, sections_at
from mindllm.config.run import RunConfig
from mindllm.mindformers.experts import EXPERT_PARALLEL, EXPERT_TENSOR
from mindllm.mindformers.keys.rules import rule_for
from mindllm.mindformers.keys.tables import KEYS
from mindllm.mindformers.reading import leaves, path_of

ENOUGH = 3  # keys that only MindFormers has: one or two are a mistake in a YAML of ours
DECIDING = (EXPERT_PARALLEL, EXPERT_TENSOR)
"""Keys of both that say how experts are shared, and so which of theirs can be had."""
OPTIONS = "mindformers."
IGNORED_KEYS = "mindformers.ignored_keys"


def is_mindformers(document: Document) -> bool:
    """Whether ``document`` has several keys that only MindFormers has; one with a ``base`` is ours."""
    if "base" in document.data:
        return False
    theirs = 0
    for path, _ in leaves(document.data):
        theirs += rule_for(KEYS, path) is not None and not is_ours(path)
        if theirs >= ENOUGH:
            return True
    return False


def is_ours(path: KeyPath) -> bool:
    """Whether our schema has a key at ``path``, or one around it that holds whatever is written below it (patterns)."""
    fields: list[Any] = [0]
    for length in range(1, len(path) + 1):
        if isinstance(path[length - 1], int):
            continue
        fields = fields_at(RunConfig, path[:length])
        if fields and not sections_at(RunConfig, path[:length]):
            return True
    return bool(fields)


def belongs_to_theirs(key: str, theirs: Document) -> bool:
    """Whether an override of ``key`` changes their YAML, before it is translated.

    So it is where the key is written there with a meaning that it has here too, where only MindFormers has the key, and where
    other keys are translated by it.
    """
    path = path_of(key)
    if rule_for(KEYS, path) is None:
        return False
    written = any(known[: len(path)] == path for known, _ in leaves(theirs.data))
    return written or not is_ours(path) or key in DECIDING
