"""The options of ``mindllm schema``."""

from __future__ import annotations

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_file

EXAMPLE = """examples:
  %(prog)s > run.schema.json
  %(prog)s --mindformers -o mindformers.schema.json

and as the first line of a YAML, for VS Code and PyCharm:
  # yaml-language-server: $schema=run.schema.json
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("schema"),
        description="Prints the JSON Schema (draft 7) of a run's YAML, by which editors complete, explain and check its keys.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--mindformers",
        action="store_true",
        help="that of a YAML of MindFormers: what becomes of each key, and which are refused",
    )
    parser.add_argument(
        "-o", "--output", type=output_file, metavar="FILE", help="file to write; without it, it is printed"
    )
    return parser
