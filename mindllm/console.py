"""The terminal: the only place where rich is told to print. Text is text, never markup; control characters are shown, not obeyed.

Names, paths, values and messages come from users, files and other programs. Printed as markup ``runs[lr=3e-4]`` loses its end,
``run.yaml:100:`` becomes a picture, ``[/x]`` is an error, and an escape sequence moves the cursor. Styles are given as
:func:`styled` text instead.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from typing import IO, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.text import Text

from mindllm.json_text import strict

Item = TypeVar("Item")
HIDDEN = re.compile(  # C0 but tab and newline, DEL, C1; separators and overrides of direction, which reorder a line; surrogates
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""``text`` with what a terminal would obey, or cannot encode, written as an escape such as ``\x1b`` or ``\ud800``."""
    return HIDDEN.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def styled(*parts: str | Text | tuple[str, str]) -> Text:
    """Joins strings, strings with a style such as ``("fits", "green")``, and texts; nothing in them is markup."""
    whole = Text()
    for part in parts:
        if isinstance(part, Text):
            whole.append_text(part)
        else:
            text, style = (part, "") if isinstance(part, str) else part
            whole.append(visible(text), style)
    return whole


class PlainConsole(Console):
    """A console that prints strings as they are and leaves it to the terminal to wrap lines.

    ``table_width`` is what tables keep to: the width of the terminal (or ``COLUMNS``), and none where nobody looks at one.
    """

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, file: IO[str] | None = None, **options
    ) -> None:
        super().__init__(
            stderr=stderr, width=width, file=file, markup=False, emoji=False, highlight=False, soft_wrap=True, **options
        )
        self.has_width = width is not None

    def on_broken_pipe(self) -> None:
        """Nobody reads any more: of the output that ends a command, of errors it does not."""
        self.quiet = True
        if not self.stderr:
            raise BrokenPipeError

    @property
    def table_width(self) -> int | None:
        """Columns a table may take; None: as many as it likes."""
        return self.width if self.has_width or self.is_terminal or "COLUMNS" in os.environ else None

    def render_str(self, text: str, **options) -> Text:  # type: ignore[override]
        """All strings that are printed, also as cells and titles, go through here."""
        options |= {"emoji": False, "markup": False, "highlight": False}
        return super().render_str(visible(text), **options)

    def status(self, status, **options) -> Status:  # type: ignore[override]
        """A line that says what is being done; of a string nothing is markup."""
        return PlainStatus(styled(status) if isinstance(status, str) else status, console=self, **options)


class PlainStatus(Status):
    """A line that says what is being done."""

    def update(self, status=None, **options) -> None:  # type: ignore[override]
        """Says something else; of a string nothing is markup."""
        super().update(styled(status) if isinstance(status, str) else status, **options)


output = PlainConsole()  # what was asked for
error_console = PlainConsole(stderr=True)  # errors, progress, and everything about the answer


def progress(*columns: ProgressColumn, console: Console | None = None, transient: bool = True, **options) -> Progress:
    """A bar after each task's description, which is not markup; ``columns`` come after it (default: how many of how many)."""
    following = columns or (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    head = TextColumn("{task.description}", markup=False)
    return Progress(head, *following, console=console or error_console, transient=transient, **options)


def track(items: Iterable[Item], description: str, *, shown: bool = True) -> Iterable[Item]:
    """Yields ``items`` while a bar on standard error says how far it has come; ``items`` must have a length."""
    with progress(disable=not shown) as bar:
        yield from bar.track(items, description=description)


def print_json(tree: Any) -> None:
    """One JSON object on one line of standard output, in ASCII: whatever is in its strings is escaped.

    A number that JSON does not know is a string, ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
    """
    sys.stdout.write(json.dumps(strict(tree), allow_nan=False) + "\n")
