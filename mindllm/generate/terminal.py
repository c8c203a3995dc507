"""What is generated goes to standard output as it appears; everything about it goes to standard error."""

from __future__ import annotations

import sys

from mindllm.generate.generator import Speed
from mindllm.terminal.console import error_console as terminal
from mindllm.terminal.text import visible

__all__ = ["describe", "terminal", "write"]


def write(text: str) -> None:
    """Writes to standard output, at once; a terminal is shown control characters instead of obeying them."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def describe(speed: Speed) -> str:
    """The speed as a line for people."""
    parts = [
        f"{name}: {tokens} tokens, {tokens / seconds:.1f} tokens/s"
        for name, tokens, seconds in (
            ("prefill", speed.prefill_tokens, speed.prefill_s),
            ("decode", speed.decode_tokens, speed.decode_s),
        )
        if seconds > 0
    ]
    return "; ".join([*parts, f"compilation: {speed.compile_s:.1f} s"])
