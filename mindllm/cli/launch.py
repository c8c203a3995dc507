"""What ``mindllm launch`` does."""

from __future__ import annotations

import codecs
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindllm.cli.parsers.launch import make_parser
from mindllm.command import CommandParser, run_command
from mindllm.errors import UserError
from mindllm.launch.script import command_of
from mindllm.launch.start import Launch, launch, refuse_impossible
from mindllm.terminal.console import error_console
from mindllm.terminal.text import visible


def main(arguments: Sequence[str] | None = None, parser: CommandParser | None = None) -> int:
    """Start several processes as one job and wait for it; return the exit code, which is that of the command."""
    options, rest = (parser or make_parser()).parse_known_args(arguments)
    if rest:
        quoted = f'"{options.command} {rest[0]} ..."'
        raise UserError(
            f"{rest[0]}: no such option; put the script and all its options in one pair of quotes: {quoted}"
        )
    wanted = _wanted(options)
    refuse_impossible(wanted)
    if options.check:
        return 0
    if wanted.has_other_nodes and not options.shared_dir:
        wanted = replace(wanted, shared_dir=shared_directory(wanted.command, wanted.log_dir))
    return launch(wanted, say, Shown())


def _wanted(options: Namespace) -> Launch:
    return Launch(
        tuple(command_of(options.command)),
        options.workers,
        options.local_workers or options.workers,
        options.log_dir,
        options.shared_dir or options.log_dir,
        master_addr=options.master_addr,
        node_rank=options.node_rank,
        port=options.port,
        timeout=options.timeout,
        restart=options.restart,
        msrun=options.msrun,
    )


def shared_directory(command: Sequence[str], log_dir: Path) -> Path:
    """The directory that all nodes of a job share: ``output_dir`` of our runs, and of another program where its logs go."""
    if Path(command[0]).name != "run_llm.py":
        return log_dir
    from mindllm.cli.parsers.run import read_config  # to read it takes a second, and one node needs none

    return Path(read_config(command[1:])[1].output_dir)


def say(text: str) -> None:
    """Print a line about the job on standard error."""
    error_console.print(text)


class Shown:
    """Prints what rank 0 writes; a terminal is shown control characters instead of obeying them."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def __call__(self, written: bytes) -> None:
        """Print what was written since the last call."""
        if sys.stdout.isatty():
            written = visible(self.decoder.decode(written)).encode()
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    run_command(main)
