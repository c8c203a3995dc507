"""What MindFormers' ``monitor_config`` watches, as the health figures of a step that mindllm has."""

from __future__ import annotations

from mindllm.config.callbacks import KEYS
from mindllm.config.reading.document import leaves
from mindllm.mindformers.keys.monitor import ENDING, FIGURES, INTERVAL, ON, OTHERS, SECTION
from mindllm.mindformers.reading import Reading

OFF = "monitor_on is false"


def translate_monitor(reading: Reading) -> None:
    """Decide every key of the section: figures that are asked for, what is told elsewhere, and what would end a run."""
    section = reading.get(SECTION)
    if not isinstance(section, dict):
        return
    is_on = section.get(ON) is True
    asked = [name for name in FIGURES if is_on and section.get(name)]
    for name, value in section.items():
        key = f"{SECTION}.{name}"
        if name == ON:
            _switch(reading, key, value, bool(asked))
        elif name == INTERVAL and asked:
            reading.use(key)
        elif name == INTERVAL or (name in FIGURES and name not in asked):
            reading.idle(key, (OFF if not is_on else "none of its figures is computed") if value else "empty")
        elif name in FIGURES:
            reading.translate(key, key, value, FIGURES[name])
        elif name in OTHERS or name in ENDING:
            _of_theirs(reading, name, value, is_on)
    if asked:
        for name in {*KEYS.values()} - {*asked}:
            reading.put(f"{SECTION}.{name}", None)


def _switch(reading: Reading, key: str, value: object, watches: bool) -> None:
    if value is True and not watches:
        reading.translate(key, key, False, "of its figures mindllm has none that is asked for")
    elif isinstance(value, bool):
        reading.use(key)
    else:
        reading.idle(key, "empty")


def _of_theirs(reading: Reading, name: str, value: object, is_on: bool) -> None:
    """A key of theirs alone, a section of which is told key by key."""
    wanted = is_on and any(found for _, found in leaves(value, (name,)))
    for path, found in leaves(value, (SECTION, name)):
        key = ".".join(map(str, path))
        if name in ENDING and wanted and found:
            reading.refuse(key, ENDING[name])
        elif not is_on:
            reading.idle(key, OFF)
        else:
            reading.idle(key, OTHERS.get(name, "off"))
