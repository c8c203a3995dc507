"""Tables of figures with their units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mindllm.terminal.tables import Column, Table

if TYPE_CHECKING:
    from mindllm.results import Part

UNITS = ("B", "KB", "MB", "GB", "TB")
COUNTS = ("", "K", "M", "G", "T", "P", "E")
STEP = 1000


def table_parts(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[str] = ()
) -> Iterator[Part]:
    """Yield rows as a table, and an empty line after it; columns in ``numbers`` are aligned at the right."""
    headings = [Column(name, is_text=name not in numbers) for name in columns]
    yield Table(title, headings, ([str(cell) for cell in row] for row in rows))
    yield ""


def size_text(number: float) -> str:
    """Bytes, in decimal units: ``1.3 MB``."""
    return _scaled(number, UNITS)


def count_text(number: float) -> str:
    """Return a large count in short form: ``16.5 M``."""
    return _scaled(number, COUNTS)


def _scaled(number: float, units: Sequence[str]) -> str:
    sign, value = ("-", -number) if number < 0 else ("", number)
    index = 0
    while value >= STEP and index < len(units) - 1:
        value /= STEP
        index += 1
    text = f"{value:.0f}" if index == 0 else f"{value:.3g}"
    return f"{sign}{text} {units[index]}".rstrip()
