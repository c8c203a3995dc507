"""``mindllm schema``: print the JSON Schema of a YAML."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mindllm import __version__
from mindllm.command import CommandParser, output_file, run_command
from mindllm.files import atomic_open
from mindllm.terminal.console import output

EXAMPLE = """examples:
  %(prog)s > run.schema.json
  %(prog)s --mindformers -o mindformers.schema.json

For VS Code and PyCharm, the first line of a YAML names the schema:
  # yaml-language-server: $schema=run.schema.json
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm schema",
        description="Prints the JSON Schema (draft 7) of a run's YAML, with which editors complete, explain and check keys.",
        epilog=EXAMPLE,
    )
    mindformers = "print the schema of a YAML of MindFormers: the effect of each key, and unsupported keys"
    parser.add_argument("--mindformers", action="store_true", help=mindformers)
    parser.add_argument("-o", "--output", type=output_file, metavar="FILE", help="file to write (default: print it)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the schema; return the exit code."""
    options = make_parser().parse_args(arguments)

    from mindllm.config.editor import run_schema
    from mindllm.mindformers.schema import mindformers_schema

    schema = mindformers_schema(__version__) if options.mindformers else run_schema(__version__)
    text = json.dumps(schema, indent=1, ensure_ascii=False)
    if options.output is None:
        output.print(text)
        return 0
    with atomic_open(options.output) as file:
        file.write(f"{text}\n")
    output.print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    run_command(main)
