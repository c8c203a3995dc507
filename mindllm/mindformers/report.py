"""The account of a conversion, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from mindllm.config.reading.document import KeyPath
from mindllm.mindformers.convert import Conversion
from mindllm.mindformers.keys.rules import Outcome
from mindllm.mindformers.reading import Entry, shown
from mindllm.terminal.tables import Column, Table
from mindllm.terminal.text import visible

CHANGING = (Outcome.REFUSED, Outcome.TRANSLATED)
"""What changes what is computed, or what it costs; other keys mean the same in both, or nothing."""
ORDER = (Outcome.REFUSED, Outcome.TRANSLATED, Outcome.WITHOUT_EFFECT, Outcome.USED)
COLOURS = {Outcome.REFUSED: "red", Outcome.TRANSLATED: "cyan", Outcome.WITHOUT_EFFECT: "dim", Outcome.USED: "green"}
LONGEST = 48


def account(source: Path, conversion: Conversion, changes: bool = False) -> Iterator[Table | str]:
    """Yield every key with what became of it, refused ones first, used ones last, or ``changes`` alone; and how many of each."""
    headings = ("line", "key", "value", "", "here", "why")
    table = Table(str(source), [Column(heading, is_text=heading != "line") for heading in headings], keys=2)
    for outcome in CHANGING if changes else ORDER:
        for entry in _without_copies(conversion.entries):
            if entry.outcome is outcome:
                table.add_row(*_cells(entry))
    yield table
    yield _summary(conversion)


def _without_copies(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries, those of a section that is the same again by its anchor as one."""
    seen: set[KeyPath] = set()
    for entry in entries:
        section = entry.path[:2]
        if section[-1] != "dataset_config" or entry.outcome is not Outcome.WITHOUT_EFFECT:
            yield entry
        elif section not in seen:
            seen.add(section)
            yield replace(entry, path=section, value="...")


def _cells(entry: Entry) -> tuple[Text, ...]:
    line = str(entry.origin.line or "") if entry.origin else ""
    value = "(left out)" if entry.origin is None else _cut(shown(entry.value))
    texts = (line, entry.key, value, entry.outcome.value, entry.becomes, entry.reason)
    return tuple(
        Text(visible(text), style=COLOURS[entry.outcome] if place == 3 else "") for place, text in enumerate(texts)
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _summary(conversion: Conversion) -> str:
    counts = conversion.counts()
    parts = [f"{count} {outcome.value}" for outcome, count in counts.items() if count]
    return f"{sum(counts.values())} keys: {', '.join(parts)}"


def as_json(source: Path, conversion: Conversion, problem: str, text: str | None) -> dict[str, Any]:
    """The same as plain data; ``yaml`` is null where something is refused."""
    return {
        "file": str(source),
        "counts": {outcome.value: count for outcome, count in conversion.counts().items()},
        "keys": [
            {
                "line": entry.origin.line if entry.origin else None,
                "key": entry.key,
                "value": entry.value,
                "outcome": entry.outcome.value,
                "here": entry.becomes,
                "reason": entry.reason,
            }
            for entry in conversion.entries
        ],
        "problems": problem.splitlines(),
        "yaml": text,
    }
