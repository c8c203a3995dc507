"""How a terminal shows a job of several processes."""

from __future__ import annotations

import codecs
import sys

from mindllm.terminal.console import error_console
from mindllm.terminal.text import visible


def say(text: str) -> None:
    """Print a line about the job on standard error."""
    error_console.print(text)


class Shown:
    """Prints what rank 0 writes; a terminal is shown control characters instead of obeying them."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def __call__(self, written: bytes) -> None:
        """Print what was written since the last call."""
        if sys.stdout.isatty():
            written = visible(self.decoder.decode(written)).encode()
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()
