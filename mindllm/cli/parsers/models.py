"""The options of ``mindllm models``."""

from __future__ import annotations

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser

EXAMPLE = """examples:
  %(prog)s                       every model with a YAML in configs/
  %(prog)s qwen3                 those whose family or name has it
  %(prog)s models/ output/run    what these directories hold
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("models"),
        description="Lists the models that come with a YAML, by family and size: parameters, sequence length, devices, where a "
        "page of docs/ has results of theirs. Of directories, and GGUF files, it lists the models in them.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME|DIR", help="part of a family's or model's name; or a directory"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
