"""Generated pages of docs/: write a page, or check that the existing file is up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_file
from mindllm.errors import CheckFailed
from mindllm.files import atomic_open
from mindllm.terminal.console import output


def write_or_check(
    arguments: Sequence[str] | None, tool: str, page: Path, source: str, description: str, render: Callable[[], str]
) -> None:
    """Run the command ``python -m tool``, which makes ``page`` of ``source``.

    Raises:
        CheckFailed: with ``--check``, the page is another.
    """
    parser = CommandParser(
        prog=f"python -m {tool}", description=description, epilog=f"example:\n  python -m {tool} --check"
    )
    parser.add_argument("--output", type=output_file, default=page, help=f"the page (default: {page})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 3 if the page is out of date")
    options = parser.parse_args(arguments)
    text = render()
    if not options.check:
        with atomic_open(options.output) as file:
            file.write(text)
        output.print(f"wrote {options.output}")
    elif not options.output.is_file() or options.output.read_text(encoding="utf-8") != text:
        raise CheckFailed(f"{options.output} is not what {source} says; run python -m {tool}")
