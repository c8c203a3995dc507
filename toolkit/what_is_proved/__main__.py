"""``python -m toolkit.what_is_proved``: writes docs/what_is_proved.md from the YAML beside it, or checks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import CheckFailed
from mindllm.files import atomic_open
from mindllm.terminal.console import output
from toolkit.what_is_proved.page import TABLE, render_page

PAGE = Path("docs/what_is_proved.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = CommandParser(
        prog="python -m toolkit.what_is_proved",
        description="Writes the page of what is proved, and by which tests, from docs/what_is_proved.yaml.",
        epilog="example:\n  python -m toolkit.what_is_proved --check",
    )
    parser.add_argument("--output", type=output_file, default=PAGE, help=f"the page (default: {PAGE})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 3 if the page is out of date")
    options = parser.parse_args(arguments)
    page = render_page(yaml.safe_load(TABLE.read_text(encoding="utf-8")))
    if not options.check:
        with atomic_open(options.output) as file:
            file.write(page)
        output.print(f"wrote {options.output}")
    elif not options.output.is_file() or options.output.read_text(encoding="utf-8") != page:
        raise CheckFailed(f"{options.output} is not what {TABLE.name} says; run python -m toolkit.what_is_proved")


if __name__ == "__main__":
    run_command(main)
