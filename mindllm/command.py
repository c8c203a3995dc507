"""Shared parts of every command line: parsing, exit codes, errors without a traceback, and a clean Ctrl-C.

Exit codes: 0 success, 1 failure, 2 invalid input, 3 a check failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP), 141 the
reader of the output has gone (``| head``).
"""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import io
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from mindllm.errors import ALIKE, LONGEST_PART, MOST_SUGGESTIONS, CheckFailed, RunFailed, UserError, bounded, nearest
from mindllm.extras import install_hint
from mindllm.files import FULL, obstacle
from mindllm.process.exit_hooks import leave
from mindllm.process.interrupts import (
    INTERRUPTED,
    interrupt_code,
    interrupt_word,
    leave_nothing_behind,
    leave_on_interrupt,
    raise_on_interrupt,
)
from mindllm.shorthands import FOREIGN_OPTIONS, IGNORE_UNKNOWN_KEYS, SHORTHANDS
from mindllm.terminal.console import error_console
from mindllm.terminal.text import styled, visible

READER_GONE = 141
MOST_COLUMNS = 120  # of help in a wider terminal
FILE_SUFFIXES = (".csv", ".html", ".json", ".jsonl", ".md", ".pdf", ".png", ".svg", ".txt", ".yaml", ".yml")
# the default of Python (700, 10, 10) spends a tenth of the time in which modules and graphs are loaded
GC_THRESHOLDS = (20_000, 20, 50)
CONFIG = "--config"
RUN, RUN_METAVARS = "RUN", ("RUN", "YAML")
RUN_HELP = "YAML of mindllm or MindFormers, or a Hugging Face directory"
LARGEST_PORT = 65535
NEGATIVE = re.compile(r"-\.?\d")
PATH_ERRORS = {  # errors of the system caused by a path of the user, not by the state of the machine
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}
SIMILAR = 0.5  # of 1: similarity from which unknown options are suggested a known one


class HelpFormatter(argparse.HelpFormatter):
    """Wraps text to the width of the terminal; keeps indented lines, such as examples, and headings with a colon."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
        super().__init__(prog, max_help_position=28, width=columns - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines, flow = list[str](), list[str]()
        for line in [*text.strip().splitlines(), ""]:
            fixed = not line or line.startswith(" ") or line.endswith(":")
            if fixed or line.startswith("Exit codes"):
                lines += textwrap.wrap(" ".join(flow), width)
                flow = []
            if fixed:
                lines.append(line)
            else:
                flow.append(line)
        return "\n".join(lines)


class CommandParser(argparse.ArgumentParser):
    """An argument parser for runs and their keys, with suggestions for misspelt options.

    Options are declared and documented with hyphens; ``--every_rank`` is accepted for ``--every-rank``. A run is a positional
    argument (:meth:`add_run`); ``--config RUN`` is accepted for it. With ``takes_keys``, unknown options are keys of a YAML
    (``--batch_size 4``), which ``parse_known_args`` returns as overrides.
    """

    key_tests: ClassVar[list[Callable[[str], bool]]] = []
    """Tests for top-level keys of a YAML, registered by the commands and called only when an option is unknown."""

    def __init__(self, *, takes_keys: bool = False, **options) -> None:
        self.takes_keys = takes_keys
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)
        if takes_keys:
            self.add_argument(
                IGNORE_UNKNOWN_KEYS, action="store_true", help="report unknown keys of the YAML and continue"
            )

    def add_run(self, help: str = RUN_HELP, group: Any = None, **options: Any) -> None:
        """Add the positional argument of a run; a mutually exclusive ``group`` makes it optional."""
        optional = {"nargs": "?"} if group else {}
        (group or self).add_argument("run", metavar=RUN, help=help, **(optional | options))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options; return unknown ones as keys of a YAML, unless they are misspelt options of this parser."""
        words = list(sys.argv[1:] if args is None else args)
        if any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._actions):
            return super().parse_known_args(self._with_hyphens(words), namespace)
        words = self._with_positional_run(self._with_hyphens(words))
        for word in words[: words.index("--") if "--" in words else None]:
            self._refuse_misspelt(word.partition("=")[0])
        if not self.takes_keys:
            return super().parse_known_args(words, namespace)
        keys, rest = self._split_keys(words)
        options, unknown = super().parse_known_args(rest, namespace)
        if options.ignore_unknown_keys:
            keys.append(IGNORE_UNKNOWN_KEYS)
        return options, [*keys, *unknown]

    def _with_hyphens(self, words: list[str]) -> list[str]:
        """Return the words with options spelled as declared: ``--every_rank`` becomes ``--every-rank``."""
        spelled = list[str]()
        for place, word in enumerate(words):
            if word == "--":
                return spelled + words[place:]
            name, equals, value = word.partition("=")
            hyphens = name.replace("_", "-")
            known = name.startswith("--") and name not in self._option_string_actions
            spelled.append(f"{hyphens}{equals}{value}" if known and hyphens in self._option_string_actions else word)
        return spelled

    def _with_positional_run(self, words: list[str]) -> list[str]:
        """Return the words with the values of ``--config`` moved to the front, where the positional arguments are."""
        # a parser that declares --config reads it itself
        positionals = [] if CONFIG in self._option_string_actions else self._get_positional_actions()
        if not any(word in str(action.metavar) for action in positionals for word in RUN_METAVARS):
            return words
        moved, rest, moving = list[str](), list[str](), False
        for word in words:
            if word.partition("=")[0] == CONFIG:
                moved += [word.removeprefix(f"{CONFIG}=")] * ("=" in word)
                moving = "=" not in word
            elif moving and not word.startswith("-"):
                moved.append(word)
                # --config of a single run takes one value; further words are positional arguments in their own place
                moving = any(action.dest == "runs" for action in self._actions)
            else:
                moving = False
                rest.append(word)
        return moved + rest

    def _split_keys(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Return the options that are keys of a YAML, with their values, and all other words.

        argparse takes a word with a space, ``--key={a: b}``, for a positional argument, and so the 4 of ``--key 4``. Where the
        parser has positional arguments, a key and its value become one word, ``--key=4``.
        """
        keys: list[str] = []
        others: list[str] = []
        joins = not all(action.option_strings for action in self._actions)
        end = words.index("--") if "--" in words else len(words)
        waiting = words[:end][::-1]
        while waiting:
            word = waiting.pop()
            option = self._option_string_actions.get(others[-1]) if others else None
            is_value = option is not None and option.nargs != 0 and " " in word
            name, equals, value = word.partition("=")
            if not word.startswith("--") or name in self._option_string_actions or is_value:
                others.append(word)
                continue
            shorthand = name.removeprefix("--").replace("-", "_")
            key = f"--{shorthand}" if shorthand in SHORTHANDS else name
            if equals or not waiting or not _is_value(waiting[-1]):
                keys.append(f"{key}{equals}{value}")
            else:
                keys += [f"{key}={waiting.pop()}"] if joins else [key, waiting.pop()]
        return keys, others + words[end:]

    def _refuse_misspelt(self, option: str) -> None:
        """End with an error if an option is unknown, similar to a known one, and not a key of a YAML."""
        declared = self._option_string_actions
        if not option.startswith("--") or option in declared or "." in option:
            return
        known = [*declared, *(f"--{name.replace('_', '-')}" for name in SHORTHANDS if self.takes_keys)]
        known += [CONFIG] * any(action.metavar in RUN_METAVARS for action in self._actions)
        candidates = difflib.get_close_matches(option[:LONGEST_PART].replace("_", "-"), known, n=1, cutoff=ALIKE)
        name = option.removeprefix("--").replace("-", "_")
        is_key = name in SHORTHANDS or name in FOREIGN_OPTIONS or any(test(name) for test in self.key_tests)
        if candidates and not (self.takes_keys and is_key):
            self.error(f"{option}: unknown option; did you mean {candidates[0]}?")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options; end with the nearest known options if one is unknown, and for an unexpected word."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            unknown = next((word for word in rest if word.startswith("-")), rest[0])
            unknown = unknown.partition("=")[0] if unknown.startswith("-") else unknown
            declared = [name for name in self._option_string_actions if name.startswith("--")]
            near = difflib.get_close_matches(unknown[:LONGEST_PART], declared, n=MOST_SUGGESTIONS, cutoff=SIMILAR)
            reason = "unknown option" if unknown.startswith("-") else "unexpected argument"
            self.error("; similar: ".join([f"{unknown}: {reason}", *([", ".join(near)] if near else [])]))
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError with the nearest choice if the value is not a choice."""
        if action.choices is not None and value not in action.choices:
            choices = [*map(str, action.choices)]
            hint = nearest(str(value), choices)
            if action.nargs == argparse.PARSER and Path(str(value)).suffix:  # a file instead of a subcommand
                hint = f"; write one of {', '.join(choices)} before it"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line, with control characters escaped."""
        commands = next((action.choices for action in self._actions if action.nargs == argparse.PARSER), None)
        if message.lower().endswith("required: command") and commands:
            aliases = {id(parser): name for name, parser in reversed(dict(commands).items())}
            message = f"{message}; valid: {', '.join(reversed(aliases.values()))}"
        if RUN in message.split() and "required" in message:
            message = f"{message}; write the run first: {self.prog} run.yaml"
        self.exit(UserError.exit_code, f"error: {visible(bounded(message))}; {self.prog} --help lists the options\n")


def _is_value(word: str) -> bool:
    return not word.startswith("-") or NEGATIVE.match(word) is not None


def run_command(main: Callable[[Sequence[str] | None], int | None], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``main`` and end with its exit code; print mistakes of the user without a traceback.

    Without ``arguments``, run the command line of this process and leave it (:mod:`mindllm.process.exit_hooks`). With them,
    raise SystemExit, or an unexpected error, in the calling program.
    """
    if arguments is not None:
        sys.exit(exit_code(main, arguments))
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        code = exit_code(main)
    except SystemExit as end:  # raised by a parser, which has printed the reason
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            error_console.print(visible(end.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = RunFailed.exit_code
    leave(code)


def exit_code(main: Callable[[Sequence[str] | None], int | None], arguments: Sequence[str] | None = None) -> int:
    """Run ``main``, print a mistake of the user, flush the output, and return the exit code."""
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    raise_on_interrupt()
    try:
        code = main(arguments) or 0
        sys.stdout.flush()
    except (UserError, RunFailed, CheckFailed) as error:
        code = _print_error(bounded(str(error)), error.exit_code)
    except KeyboardInterrupt:
        error_console.print(interrupt_word())
        leave_nothing_behind()
        code = INTERRUPTED
    except BrokenPipeError:
        code = READER_GONE
    except OSError as error:
        if error.errno is None:
            raise
        code = UserError.exit_code if error.errno in PATH_ERRORS else RunFailed.exit_code
        _print_error(_system_message(error), code)
    except ModuleNotFoundError as error:
        if not (hint := install_hint(error)):
            raise
        code = _print_error(hint, UserError.exit_code)
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        code = _print_error(f"out of memory{reason}; use smaller batches or fewer workers", RunFailed.exit_code)
    leave_on_interrupt()
    if code == INTERRUPTED:
        code = interrupt_code()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = READER_GONE
    except OSError:  # a full disk, printed above; an earlier failure decides the code
        code = code or RunFailed.exit_code
    if code == READER_GONE:  # keep the interpreter from writing there when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _print_error(text: str, code: int) -> int:
    error_console.print(styled(("error:", "bold red"), f" {text}"))
    return code


def _system_message(error: OSError) -> str:
    names = [bounded(str(name), LONGEST_PART) for name in (error.filename, error.filename2) if name is not None]
    reason = error.strerror or str(error)
    message = ": ".join([" -> ".join(names), reason]) if names else reason
    return f"{message}; free disk space or write elsewhere" if error.errno in FULL else message


def positive(text: str) -> int:
    """Return an integer of at least 1, as the type of an option."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1 (value {text})")
    return int(text)


def non_negative(text: str) -> int:
    """Return an integer of at least 0, as the type of an option."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0 (value {text})")
    return int(text)


def port(text: str) -> int:
    """Return a TCP port, as the type of an option."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to {LARGEST_PORT} (value {text})")
    return int(text)


def positive_number(text: str) -> float:
    """Return a finite number above 0, such as seconds, as the type of an option."""
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0 (value {text})")
    return value


def patience(text: str) -> float:
    """Return a finite number of seconds of at least 0, as the type of an option."""
    if not 0 <= (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0 (value {text})")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def file_size(text: str) -> int:
    """Return the bytes of a size such as 5GB (decimal units), as the type of an option."""
    from mindllm.files import size_in_bytes

    try:
        return size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_file(text: str) -> Path:
    """Return a file to write, as the type of an option; refuse one that is not writable before any work is done."""
    if text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text}: is a directory; this option takes a file")
    return _writable(text, directory=False)


def output_directory(text: str) -> Path:
    """Return a directory to write into, as the type of an option; refuse a file and what is not writable."""
    if Path(text).suffix.lower() in FILE_SUFFIXES and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is the name of a file; this option takes a directory")
    return _writable(text, directory=True)


def _writable(text: str, directory: bool) -> Path:
    if reason := obstacle(text, directory):
        raise argparse.ArgumentTypeError(f"{text}: {reason}")
    return Path(text)
