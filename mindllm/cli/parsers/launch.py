"""The options of ``mindllm launch``: those of ``python -m mindllm.launch``."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser
from mindllm.launch.__main__ import make_parser as launch_parser

DEVICES = Path("/dev"), "davinci[0-9]*"  # where there are Ascend devices, MindSpore's msrun starts the ranks


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = launch_parser(spelled("launch"), "train")
    directory, pattern = DEVICES
    parser.set_defaults(msrun=any(directory.glob(pattern)))
    return parser
