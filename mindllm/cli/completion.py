"""``mindllm completion bash|zsh|fish``: a script that completes verbs, options and files, made by shtab from the parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mindllm.cli.registry import TABLE, VERBS
from mindllm.command import CommandParser

SHELLS = ("bash", "zsh", "fish")
DIRECTORIES = (
    "DIR",
    "DIRECTORY",
    "HF_DIRECTORY",
    "PEFT_DIRECTORY",
)  # what options call them; all other paths are files
EXAMPLES = """to install it:
  mindllm completion bash > ~/.local/share/bash-completion/completions/mindllm
  mindllm completion zsh > ~/.zfunc/_mindllm     # a directory of fpath
  mindllm completion fish > ~/.config/fish/completions/mindllm.fish
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm completion",
        description="Prints a script by which a shell completes verbs, options and files.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script; return the exit code."""
    options = make_parser().parse_args(arguments)
    import shtab

    sys.stdout.write(shtab.complete(every_verb(), options.shell) + "\n")
    return 0


def every_verb() -> CommandParser:
    """Return the parser of the whole command, which nothing but completion needs: it imports the parsers of all verbs."""
    root = CommandParser(prog="mindllm", description="proves and runs training of large language models")
    root.add_argument("--version", action="store_true", help="versions of mindllm and MindSpore")
    verbs = root.add_subparsers(dest="verb", parser_class=_parser_of)  # type: ignore[call-overload]  # any callable does
    for verb in TABLE:
        verbs.add_parser(verb.name, help=verb.help)
    verbs.add_parser("completion", help="a script that completes verbs, options and files")
    complete_paths(root)
    return root


def _parser_of(prog: str, **options: Any) -> CommandParser:
    """The parser of the verb that ``prog`` ends with, as argparse asks for it; it is described in one line, as shells show it."""
    verb = VERBS.get(prog.rpartition(" ")[2])
    parser = verb.parser() if verb else make_parser()
    parser.description = verb.help if verb else "print a script that completes verbs, options and files"
    if verb and verb.name == "time":
        _add_calibrate(parser)
    return parser


def _add_calibrate(parser: CommandParser) -> None:
    """Show ``calibrate`` to shells: ``mindllm time`` takes that word aside before it parses anything."""
    from mindllm.cli.time import CALIBRATE, calibrate_parser

    below = parser.add_subparsers(dest="below", parser_class=lambda prog, **options: calibrate_parser())  # type: ignore[call-overload]
    below.add_parser(CALIBRATE, help="fit a device to what was measured")


def complete_paths(parser: argparse.ArgumentParser) -> None:
    """Mark all arguments that are files and directories, of the parser and those below it."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                complete_paths(below)
        elif action.metavar and not action.choices and _is_path(action):
            action.complete = shtab.DIRECTORY if action.metavar in DIRECTORIES else shtab.FILE  # type: ignore[attr-defined]


def _is_path(action: argparse.Action) -> bool:
    from pathlib import Path

    from mindllm.command import output_directory, output_file

    return action.type in (Path, output_file, output_directory) or action.metavar in (
        *DIRECTORIES,
        "YAML",
        "FILE",
        "RUN.yaml",
    )
