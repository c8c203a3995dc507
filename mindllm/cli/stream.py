"""What is generated goes to standard output as it appears; everything about it goes to standard error."""

from __future__ import annotations

import sys

from mindllm.terminal.text import visible


def write(text: str) -> None:
    """Write to standard output, at once; a terminal is shown control characters instead of obeying them."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
