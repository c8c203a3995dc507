"""``mindllm completion bash|zsh|fish``: a script that completes verbs, options and files, made by shtab from the parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindllm.cli.registry import TABLE, VERBS
from mindllm.command import CommandParser, output_directory, output_file

SHELLS = ("bash", "zsh", "fish")
DIRECTORIES = ("DIR", "DIRECTORY", "HF_DIRECTORY", "PEFT_DIRECTORY")  # metavars of directories; other paths are files
FILES = ("YAML", "FILE", "RUN", "RUN.yaml", "MODEL|RUN", "NETWORK|YAML")
EXAMPLES = """to install it:
  mindllm completion bash > ~/.local/share/bash-completion/completions/mindllm
  mindllm completion zsh > ~/.zfunc/_mindllm     # a directory of fpath
  mindllm completion fish > ~/.config/fish/completions/mindllm.fish
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm completion",
        description="Prints a script with which a shell completes verbs, options and files.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script; return the exit code."""
    options = make_parser().parse_args(arguments)
    import shtab

    sys.stdout.write(shtab.complete(full_parser(), options.shell) + "\n")
    return 0


def full_parser() -> CommandParser:
    """Return the parser of the whole command, with the parsers of all verbs."""
    root = CommandParser(prog="mindllm", description="prove and execute training of large language models")
    root.add_argument("--version", action="store_true", help="print the versions of mindllm and MindSpore")
    verbs = root.add_subparsers(dest="verb", parser_class=_verb_parser)  # type: ignore[call-overload]  # any callable works
    for verb in TABLE:
        verbs.add_parser(verb.name, help=verb.help)
    verbs.add_parser("completion", help="print a script that completes verbs, options and files")
    complete_paths(root)
    return root


def _verb_parser(prog: str, **options: Any) -> CommandParser:
    """Return the parser of the verb at the end of ``prog``, with a description of one line, as shells show it."""
    verb = VERBS.get(prog.rpartition(" ")[2])
    parser = verb.parser() if verb else make_parser()
    parser.description = verb.help if verb else "print a script that completes verbs, options and files"
    if verb and verb.name == "time":
        # mindllm time handles the word calibrate before its parser does
        from mindllm.cli.time import CALIBRATE, calibrate_parser

        below = parser.add_subparsers(dest="below", parser_class=lambda prog, **options: calibrate_parser())  # type: ignore[call-overload]
        below.add_parser(CALIBRATE, help="fit a device to measurements")
        parser._actions.insert(0, parser._actions.pop())  # before the run, so that shells complete the word
    return parser


def complete_paths(parser: argparse.ArgumentParser) -> None:
    """Mark all arguments that are files or directories, also of the parsers of subcommands."""
    import shtab

    types = (Path, output_file, output_directory)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                complete_paths(below)
        elif (
            action.metavar and not action.choices and (action.type in types or action.metavar in (*DIRECTORIES, *FILES))
        ):
            kind = shtab.DIRECTORY if action.metavar in DIRECTORIES else shtab.FILE
            action.complete = kind  # type: ignore[attr-defined]
