"""Tables for terminals. Figures are never truncated: in a narrow terminal, columns are stacked and texts folded."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from mindllm.terminal.console import PlainConsole, output
from mindllm.terminal.text import styled

GAP = 2
NARROW = 24  # width to which texts are folded before columns are stacked
Cell = str | Text


@dataclass(frozen=True)
class Column:
    """A column: figures are aligned right and never folded, texts are aligned left."""

    name: str
    is_text: bool = False


class Table:
    """Rows of cells under headings, as wide as the terminal allows.

    Headings are folded first, then columns of texts; if that is not enough the table is printed as several, one below the
    other, which all begin with the first ``keys`` columns.
    """

    def __init__(
        self, title: Cell, columns: Sequence[Column], rows: Iterable[Sequence[Cell]] = (), keys: int = 1
    ) -> None:
        self.title = title if isinstance(title, Text) else styled((title, "bold"))
        self.columns = list(columns)
        self.headings = [styled((column.name, "bold")) for column in columns]
        self.rows: list[list[Text]] = []
        self.keys = keys
        for row in rows:
            self.add_row(*row)

    def add_row(self, *cells: Cell) -> None:
        """Add a row with a cell for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([cell if isinstance(cell, Text) else styled(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limit = width_limit(console, options)
        if self.title.plain:
            yield self.title
        for number, places in enumerate(self._parts(limit)):
            if number:
                yield Text()
            widths = self._widths(places, limit)
            yield from self._lines(console, [self.headings[place] for place in places], places, widths, folded=True)
            for row in self.rows:
                yield from self._lines(console, [row[place] for place in places], places, widths)

    def fits(self, limit: int | None) -> bool:
        """Return True if all columns stand next to each other in ``limit`` cells."""
        return len(self._parts(limit)) == 1

    def _parts(self, limit: int | None) -> list[list[int]]:
        """Return the column numbers of each printed part; all parts contain the key columns."""
        least = [self._least(place) for place in range(len(self.columns))]
        keys, parts, part = list(range(self.keys)), [], []  # type: list[int], list[list[int]], list[int]
        for place in range(self.keys, len(self.columns)):
            if limit and part and _total(least[column] for column in (*keys, *part, place)) > limit:
                parts, part = [*parts, part], []
            part.append(place)
        return [keys + part for part in [*parts, part]]

    def _widths(self, places: Sequence[int], limit: int | None) -> list[int]:
        """Return column widths: the minimum, plus the remaining width, for texts first and then for headings."""
        widths = {place: self._least(place) for place in places}
        wide = {place: max(self._cells(place), self.headings[place].cell_len) for place in places}
        remaining = max(0, limit - _total(widths.values())) if limit else sum(wide.values())
        for place in sorted(places, key=lambda place: not self.columns[place].is_text):
            more = min(remaining, wide[place] - widths[place])
            widths[place], remaining = widths[place] + more, remaining - more
        return [widths[place] for place in places]

    def _lines(
        self,
        console: Console,
        cells: Sequence[Text],
        places: Sequence[int],
        widths: Sequence[int],
        folded: bool = False,
    ) -> Iterator[Text]:
        """Yield the lines of a row, with the lines of its cells next to each other."""
        columns: list[list[Text]] = []
        for cell, place, width in zip(cells, places, widths, strict=True):
            is_text = self.columns[place].is_text
            parts = (
                cell.wrap(console, width, overflow="fold") if folded or is_text else cell.split("\n", allow_blank=True)
            )
            columns.append([_padded(part, width, align_left=is_text) for part in parts])
        for line in zip_longest(*columns):
            row = Text()
            for part, width in zip(line, widths, strict=True):
                row.append_text(Text(" " * width) if part is None else part).append(" " * GAP)
            row.rstrip()
            yield row

    def _cells(self, place: int) -> int:
        """Return the width of the widest cell."""
        return max((line.cell_len for row in self.rows for line in row[place].split("\n", allow_blank=True)), default=0)

    def _least(self, place: int) -> int:
        """Return the minimum width of a column."""
        heading = max(map(cell_len, self.headings[place].plain.split()), default=0)
        cells = self._cells(place)
        return max(heading, min(cells, NARROW) if self.columns[place].is_text else cells)


def as_text(parts: Iterable[Cell | Table]) -> str:
    """Return lines and tables as text, as the terminal shows them."""
    console = PlainConsole(file=io.StringIO(), width=output.table_width)
    for part in parts:
        console.print(part)
    return console.file.getvalue().removesuffix("\n")  # type: ignore[attr-defined]


def width_limit(console: Console, options: ConsoleOptions) -> int | None:
    """Return the width of a line; None if it is unlimited, as in a file."""
    return console.table_width if isinstance(console, PlainConsole) else options.max_width


def pairs(rows: Iterable[tuple[str, Cell]]) -> RichTable:
    """Return a table of names and values, one pair per line; long values such as paths are folded."""
    table = RichTable(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(styled((name, "bold")), value if isinstance(value, Text) else styled(value))
    return table


def figures(*names: str) -> list[Column]:
    """Return columns of figures."""
    return [Column(name) for name in names]


def texts(*names: str) -> list[Column]:
    """Return columns of texts."""
    return [Column(name, is_text=True) for name in names]


def _total(widths: Iterable[int]) -> int:
    sizes = list(widths)
    return sum(sizes) + GAP * (len(sizes) - 1)


def _padded(part: Text, width: int, align_left: bool) -> Text:
    part.rstrip()
    space = Text(" " * max(0, width - part.cell_len))
    return part + space if align_left else space + part
