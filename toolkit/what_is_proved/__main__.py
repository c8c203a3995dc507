"""``python -m toolkit.what_is_proved``: writes docs/what_is_proved.md from the YAML beside it, or checks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from mindllm.command import run_command
from toolkit._generated_page import write_or_check
from toolkit.what_is_proved.page import TABLE, render_page

PAGE = Path("docs/what_is_proved.md")
DESCRIPTION = "Writes the page of what is proved, and by which tests, from docs/what_is_proved.yaml."


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks the page."""
    write_or_check(
        arguments,
        "toolkit.what_is_proved",
        PAGE,
        TABLE.name,
        DESCRIPTION,
        lambda: render_page(yaml.safe_load(TABLE.read_text(encoding="utf-8"))),
    )


if __name__ == "__main__":
    run_command(main)
