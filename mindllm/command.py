"""What every command line of the project shares: exit codes, errors without a traceback, a clean Ctrl-C, one console.

Exit codes: 0 good, 1 failure, 2 wrong input, 3 a check says no, 130 interrupted, 141 the reader of the output left (``| head``).
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from mindllm.console import error_console, styled, visible
from mindllm.errors import CheckFailed, RunFailed, UserError

INTERRUPTED = 130
READER_GONE = 141


class CommandParser(argparse.ArgumentParser):
    """An argument parser that keeps the layout of the example in its epilog and takes no abbreviations."""

    def __init__(self, **options) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Ends with 2, as argparse does; what it quotes is not obeyed by the terminal."""
        super().error(visible(message))


def run_command(main: Callable[[Sequence[str] | None], int | None], arguments: Sequence[str] | None = None) -> None:
    """Runs ``main`` and leaves the process with its exit code; mistakes of the user are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal has no character for is escaped, not a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main(arguments) or 0
    except (UserError, RunFailed, CheckFailed) as error:
        error_console.print(styled(("error:", "bold red"), f" {error}"))
        code = error.exit_code
    except KeyboardInterrupt:
        error_console.print("interrupted")
        code = INTERRUPTED
    except BrokenPipeError:
        code = READER_GONE
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = READER_GONE
    if code == READER_GONE:  # nothing more can be written there, not even by the interpreter when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt: MindSpore makes it send SIGTERM from the first graph on, so that is what counts."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
