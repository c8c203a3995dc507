"""The account of a conversion, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from mindllm.config.reading.document import KeyPath
from mindllm.mindformers.reader import Conversion
from mindllm.mindformers.reading import Entry, Outcome, shown
from mindllm.terminal.tables import Column, Table, width_limit
from mindllm.terminal.text import visible

CHANGING = (Outcome.REFUSED, Outcome.TRANSLATED)
"""Outcomes that change the result or its cost. Other keys have the same meaning or no effect."""
ORDER = (Outcome.REFUSED, Outcome.TRANSLATED, Outcome.WITHOUT_EFFECT, Outcome.USED)
COLORS = {Outcome.REFUSED: "red", Outcome.TRANSLATED: "cyan", Outcome.WITHOUT_EFFECT: "dim", Outcome.USED: "green"}
LONGEST = 48
INDENT = 6
NARROWEST = 10
COPY = "..."  # shown for a section that is the same again


def account(source: Path, conversion: Conversion, changes: bool = False) -> Iterator[Account | str]:
    """Yield every key with what became of it, refused ones first, used ones last, or ``changes`` alone; and how many of each."""
    entries = list(_without_copies(conversion.entries))
    outcomes = CHANGING if changes else ORDER
    yield Account(
        str(source), {outcome: [entry for entry in entries if entry.outcome is outcome] for outcome in outcomes}
    )
    yield _summary(conversion)


@dataclass(frozen=True)
class Account:
    """Keys by outcome: a table where the terminal is wide enough, else a list with a section for each outcome."""

    title: str
    entries: Mapping[Outcome, Sequence[Entry]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limit = width_limit(console, options)
        table = self._table()
        if limit is None or table.fits(limit):
            yield table
            return
        yield table.title
        for outcome, entries in self.entries.items():
            if entries:
                yield Text()
                yield Text(f"{outcome.value}: {len(entries)}", style=COLORS[outcome])
            for entry in entries:
                yield from _list_lines(entry, console, limit)

    def _table(self) -> Table:
        headings = ("line", "key", "value", "", "here", "why")
        table = Table(self.title, [Column(heading, is_text=heading != "line") for heading in headings], keys=2)
        for entries in self.entries.values():
            for entry in entries:
                table.add_row(*_cells(entry))
        return table


def _list_lines(entry: Entry, console: Console, limit: int) -> Iterator[Text]:
    """Yield a key with its value, and below it what stands here and why, no line wider than ``limit``."""
    line, key, value, _, target, why = (cell.plain for cell in _cells(entry))
    parts = [f"{key} {value}" if entry.origin is None else f"{key}: {value}", f"-> {target}" if target else "", why]
    for number, part in enumerate(part for part in parts if part):
        start = f"{line:>4}  " if not number else " " * INDENT
        for folded in Text(part).wrap(console, max(limit - INDENT - 2, NARROWEST), overflow="fold"):
            folded.rstrip()
            yield Text(start) + folded
            start = " " * (INDENT + 2 * (not number))


def _without_copies(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries; a section repeated by an anchor is one entry."""
    sections: set[KeyPath] = set()
    for entry in entries:
        section = entry.path[:2]
        if section[-1] != "dataset_config" or entry.outcome is not Outcome.WITHOUT_EFFECT:
            yield entry
        elif section not in sections:
            sections.add(section)
            yield replace(entry, path=section, value=COPY)


def _cells(entry: Entry) -> tuple[Text, ...]:
    line = str(entry.origin.line or "") if entry.origin else ""
    value = "(left out)" if entry.origin is None else COPY if entry.value == COPY else _cut(shown(entry.value))
    texts = (line, entry.key, value, entry.outcome.value, entry.becomes, entry.reason)
    return tuple(
        Text(visible(text), style=COLORS[entry.outcome] if place == 3 else "") for place, text in enumerate(texts)
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _summary(conversion: Conversion) -> str:
    counts = conversion.counts()
    parts = [f"{count} {outcome.value}" for outcome, count in counts.items() if count]
    return f"{sum(counts.values())} keys: {', '.join(parts)}"


def as_json(source: Path, conversion: Conversion, problem: str, text: str | None) -> dict[str, Any]:
    """Return the account as plain data; ``yaml`` is null if a key is refused."""
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
