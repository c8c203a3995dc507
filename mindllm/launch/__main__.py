"""``python -m mindllm.launch``: what ``mindllm launch`` does, without a look for Ascend devices."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.cli.launch import main as launch
from mindllm.cli.launch import module_parser
from mindllm.command import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the job and wait for it."""
    return launch(arguments, module_parser())


if __name__ == "__main__":
    run_command(main)
