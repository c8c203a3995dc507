"""``python -m toolkit.config_reference``: writes docs/config_reference.md, or checks that it is up to date."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import run_command
from toolkit._generated_page import write_or_check
from toolkit.config_reference.page import render_page

PAGE = Path("docs/config_reference.md")
DESCRIPTION = "Writes the reference of every configuration key from the schema."


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks the page."""
    write_or_check(arguments, "toolkit.config_reference", PAGE, "the schema", DESCRIPTION, render_page)


if __name__ == "__main__":
    run_command(main)
