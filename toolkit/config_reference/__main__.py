"""``python -m toolkit.config_reference``: writes docs/config_reference.md, or checks that it is up to date."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import CheckFailed
from mindllm.files import atomic_open
from mindllm.terminal.console import output
from toolkit.config_reference.page import render_page

PAGE = Path("docs/config_reference.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = CommandParser(
        prog="python -m toolkit.config_reference",
        description="Writes the reference of every configuration key from the schema.",
        epilog="example:\n  python -m toolkit.config_reference --check",
    )
    parser.add_argument("--output", type=output_file, default=PAGE, help=f"the page (default: {PAGE})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 3 if the page is out of date")
    options = parser.parse_args(arguments)
    page = render_page()
    if not options.check:
        with atomic_open(options.output) as file:
            file.write(page)
        output.print(f"wrote {options.output}")
    elif not options.output.is_file() or options.output.read_text(encoding="utf-8") != page:
        raise CheckFailed(f"{options.output} is not what the schema says; run python -m toolkit.config_reference")


if __name__ == "__main__":
    run_command(main)
