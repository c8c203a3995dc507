"""``swap_config`` of MindFormers: results that wait on the host; its patterns name operators of its layers."""

from __future__ import annotations

from typing import Any

from mindllm.mindformers.reading import Reading
from mindllm.mindformers.recomputation import SELECTIONS, known_pattern

SECTION = "swap_config"
KEYS = ("swap", "default_prefetch", "layer_swap", "op_swap")
EVERYWHERE = r".*\.flash_attention"


def translate_swap(reading: Reading) -> None:
    """Every key of ``swap_config``; those of ``recompute_config`` must have been translated."""
    given = [f"{SECTION}.{key}" for key in KEYS if reading.has(f"{SECTION}.{key}")]
    if reading.get(f"{SECTION}.swap") is not True:
        for key in given:
            reading.idle(key, "nothing is swapped")
        return
    for name in ("recompute", *SELECTIONS):
        if isinstance(reading.get(f"recompute_config.{name}"), list | dict):
            message = "with swap_config.swap a list has numbers of layers in MindFormers, and counts without"
            reading.refuse(f"recompute_config.{name}", f"{message}; write true or false")
    for key in given:
        if key.endswith(".op_swap") and reading.get(key) is not None:
            _operators(reading, key)
        else:
            reading.use(key)


def _operators(reading: Reading, key: str) -> None:
    """The list of operators under the names that they have here; MindFormers does nothing for one that matches none."""
    value = reading.get(key)
    entries, dropped = [], []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or "op_name" not in entry:
            reading.use(key)  # our schema says what is wrong with it
            return
        names = entry["op_name"] if isinstance(entry["op_name"], list) else [entry["op_name"]]
        found = {str(name): _ours(reading, str(name)) for name in names}
        dropped += [name for name, ours in found.items() if ours is None]
        if kept := [ours for ours in found.values() if ours is not None]:
            entries.append({**entry, "op_name": kept})
    reason = f"left out, no operator of a layer here: {', '.join(dropped)}" if dropped else ""
    ours: Any = entries or None
    reading.translate(key, key, ours, reason)


def _ours(reading: Reading, pattern: str) -> str | None:
    theirs = pattern if pattern != EVERYWHERE else r"attention\.flash_attention"
    return known_pattern(reading, theirs.replace("self_attention", "attention").replace("core_attention", "attention"))[
        0
    ]
