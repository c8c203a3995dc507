"""Tables for people, one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

UNITS = ("B", "KB", "MB", "GB", "TB")
COUNTS = ("", "K", "M", "G", "T", "P", "E")
STEP = 1000


def console() -> Console:
    """Standard output; lines longer than a terminal are not cut where nobody looks at a terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=160)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[str] = ()) -> None:
    """Prints rows; columns in ``numbers`` are aligned at the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    out = console()
    out.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    out.print(table)


def print_json(tree: Any) -> None:
    """One JSON object on one line."""
    print(json.dumps(tree, ensure_ascii=False))


def size_text(number: float) -> str:
    """Bytes, in decimal units: ``1.3 MB``."""
    return _scaled(number, UNITS)


def count_text(number: float) -> str:
    """A large count: ``16.5 M``."""
    return _scaled(number, COUNTS)


def _scaled(number: float, units: Sequence[str]) -> str:
    sign, value = ("-", -number) if number < 0 else ("", number)
    index = 0
    while value >= STEP and index < len(units) - 1:
        value /= STEP
        index += 1
    text = f"{value:.0f}" if index == 0 else f"{value:.3g}"
    return f"{sign}{text} {units[index]}".rstrip()
