"""What ``mindllm schema`` does."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mindllm import __version__
from mindllm.cli.parsers.schema import make_parser
from mindllm.command import run_command
from mindllm.config.editor.schema import run_schema
from mindllm.config.editor.theirs import mindformers_schema
from mindllm.files import atomic_open
from mindllm.terminal.console import output


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints or writes the schema; returns the exit code."""
    options = make_parser().parse_args(arguments)
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
