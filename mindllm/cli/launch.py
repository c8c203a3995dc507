"""What ``mindllm launch`` does."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.cli.parsers.launch import make_parser
from mindllm.launch import __main__ as launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Start several processes as one job and wait for it; return the exit code."""
    return launch.main(arguments, make_parser())
