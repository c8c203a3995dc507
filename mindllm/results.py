"""Results of library functions: frozen values that print as the tables of a command, and convert to JSON and HTML."""

from __future__ import annotations

import html
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from mindllm.terminal.json_text import SCHEMA, strict

if TYPE_CHECKING:  # rich takes longer to import than all of `import mindllm`
    from rich.text import Text

    from mindllm.terminal.tables import Table

    Part = str | Text | Table

CELL = ' style="text-align:{}"'


class Result:
    """Base class of results. ``schema`` increases when a key of :meth:`to_dict` changes its meaning or is removed."""

    schema: ClassVar[int] = 1

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """Yield the lines and tables of the command."""

    @abstractmethod
    def tree(self) -> dict[str, Any]:
        """Return the keys of :meth:`to_dict` without ``schema``."""

    def table(self) -> Table:
        """Return the first table of the result.

        Raises:
            LookupError: the result has no table.
        """
        from mindllm.terminal.tables import Table

        table = next((part for part in self.parts() if isinstance(part, Table)), None)
        if table is None:
            raise LookupError(f"{type(self).__name__} has no table; print it")
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``--json``: plain values, with the version of their keys under ``schema``.

        A number that is not finite is ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
        """
        return {SCHEMA: self.schema, **strict(self.tree())}

    def summary(self) -> str:
        """Return the result in one line, for ``repr``."""
        return ""

    def __repr__(self) -> str:
        words = self.summary()
        return f"<{type(self).__name__}{': ' * bool(words)}{words}>"

    def __str__(self) -> str:
        from mindllm.terminal.tables import as_text

        return as_text(self.parts())

    def _repr_html_(self) -> str:
        from mindllm.terminal.tables import Table

        return "\n".join(
            "".join(_html_table(part)) if isinstance(part, Table) else f"<p>{html.escape(_plain(part).strip())}</p>"
            for part in self.parts()
        )


def _html_table(table: Table) -> Iterator[str]:
    """Yield a table as escaped HTML, with figures aligned right and texts left."""
    sides = [CELL.format("left" if column.is_text else "right") for column in table.columns]
    yield f"<table><caption>{html.escape(_plain(table.title))}</caption>"
    for tag, cells in (("th", table.headings), *(("td", row) for row in table.rows)):
        pairs = zip(cells, sides, strict=True)
        yield f"<tr>{''.join(f'<{tag}{side}>{html.escape(_plain(cell))}</{tag}>' for cell, side in pairs)}</tr>"
    yield "</table>"


def _plain(part: str | Text) -> str:
    from mindllm.terminal.text import visible

    return visible(part if isinstance(part, str) else part.plain)
