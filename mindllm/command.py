"""What every command line of the project shares: exit codes, errors without a traceback, a clean Ctrl-C, one console.

Exit codes: 0 good, 1 failure, 2 wrong input, 3 a check says no, 130 interrupted (143 by SIGTERM, 129 by SIGHUP), 141 the reader
of the output left (``| head``).
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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from mindllm.errors import ALIKE, LONGEST_PART, CheckFailed, RunFailed, UserError, bounded, nearest
from mindllm.extras import advice
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
from mindllm.shorthands import IGNORE_UNKNOWN_KEYS, OF_OTHERS, SHORTHANDS
from mindllm.terminal.console import error_console
from mindllm.terminal.text import styled, visible

READER_GONE = 141
MAX_SUGGESTIONS = 5
FILE_SUFFIXES = (".csv", ".html", ".json", ".jsonl", ".md", ".pdf", ".png", ".svg", ".txt", ".yaml", ".yml")
# Python's 700, 10, 10 take a tenth of the time in which modules and graphs are read
SEARCHES_FOR_GARBAGE = (20_000, 20, 50)
CONFIG = "--config"
RUNS = ("RUN", "YAML")  # what a positional argument is called that names runs
LARGEST_PORT = 65535
NEGATIVE = re.compile(r"-\.?\d")
IMPOSSIBLE = {  # errors of the system that are about the path a user gave, not about the state of the machine
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


class CommandParser(argparse.ArgumentParser):
    """An argument parser that keeps the layout of the example in its epilog, takes no abbreviations, and knows what was meant.

    With ``takes_keys`` options that it does not know are keys of a YAML, ``--batch_size 4``, for ``parse_known_args`` to return
    as overrides, with :data:`~mindllm.shorthands.IGNORE_UNKNOWN_KEYS` where it is given.
    Where it has ``--config`` and takes no other words, words before all options are that: ``mindllm check run.yaml``; so are
    those behind options that have their value already: ``mindllm time --device a100_80g run.yaml``.
    """

    key_tests: ClassVar[list[Callable[[str], bool]]] = []
    """Tell keys of a YAML's top level: added by who knows the schema, and asked when something is wrong."""

    def __init__(self, *, takes_keys: bool = False, **options) -> None:
        self.takes_keys = takes_keys
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        if takes_keys:
            text = "name keys of the YAML that nobody knows, and go on without them"
            self.add_argument(IGNORE_UNKNOWN_KEYS, action="store_true", help=text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read options and leave unknown ones, which may be keys of a YAML, unless they are options of ours misspelt."""
        given = self._with_config(list(sys.argv[1:] if args is None else args))
        if any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._actions):
            return super().parse_known_args(given, namespace)
        for word in given[: given.index("--") if "--" in given else None]:
            self._refuse_misspelt(word.partition("=")[0])
        if not self.takes_keys:
            return super().parse_known_args(given, namespace)
        keys, others = self._split_keys(given)
        options, rest = super().parse_known_args(others, namespace)
        if options.ignore_unknown_keys:
            keys.append(IGNORE_UNKNOWN_KEYS)
        return options, [*keys, *rest]

    def _with_config(self, given: list[str]) -> list[str]:
        """``run.yaml`` as ``--config run.yaml``, and the other way round where the run has no such option."""
        if any(action.metavar in RUNS and not action.option_strings for action in self._actions):
            return [word.removeprefix(f"{CONFIG}=") for word in given if word != CONFIG]  # as other verbs are asked
        if CONFIG not in self._option_string_actions or not all(action.option_strings for action in self._actions):
            return given
        if given and not given[0].startswith("-"):
            return [CONFIG, *given]
        lone = [] if any(word.partition("=")[0] == CONFIG for word in given) else self._lone_words(given)
        words = [given[place] for place in lone]
        return [CONFIG, *words, *(word for place, word in enumerate(given) if place not in lone)] if words else given

    def _lone_words(self, given: list[str]) -> list[int]:
        """Places of words that are no option and no option's value; what follows an unknown option is taken for its value."""
        lone, taking = [], False
        for place, word in enumerate(given):
            if word == "--":
                break
            if word.startswith("-"):
                action = self._option_string_actions.get(word)
                unknown = action is None and "=" not in word
                taking = unknown or (action is not None and action.nargs != 0 and "=" not in word)
                several = action is not None and action.nargs in ("*", "+")
            elif not taking:
                lone.append(place)
            else:
                taking = several
        return lone

    def _split_keys(self, given: list[str]) -> tuple[list[str], list[str]]:
        """Return the options that are keys of a YAML, with their values, and all other words.

        argparse takes a word with a space, ``--key={a: b}``, for a positional argument, and so is the 4 of ``--key 4``. Where the
        parser has positional arguments, a key and its value become one word, ``--key=4``.
        """
        keys: list[str] = []
        others: list[str] = []
        joins = not all(action.option_strings for action in self._actions)
        end = given.index("--") if "--" in given else len(given)
        waiting = given[:end][::-1]
        while waiting:
            word = waiting.pop()
            before = self._option_string_actions.get(others[-1]) if others else None
            is_value = before is not None and before.nargs != 0 and " " in word
            name, equals, _ = word.partition("=")
            if not word.startswith("--") or name in self._option_string_actions or is_value:
                others.append(word)
            elif equals or not waiting or not _is_value(waiting[-1]):
                keys.append(word)
            else:
                keys += [f"{word}={waiting.pop()}"] if joins else [word, waiting.pop()]
        return keys, others + given[end:]

    def _refuse_misspelt(self, option: str) -> None:
        ours = self._option_string_actions
        if not option.startswith("--") or option in ours or "." in option:
            return
        known = [*ours, *(f"--{name}" for name in SHORTHANDS if self.takes_keys)]
        meant = difflib.get_close_matches(option[:LONGEST_PART], known, n=1, cutoff=ALIKE)
        name = option.removeprefix("--")
        is_key = name in SHORTHANDS or name in OF_OTHERS or any(test(name) for test in self.key_tests)
        if meant and not (self.takes_keys and is_key):
            self.error(f"{option}: no such option; did you mean {meant[0]}?")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read options; end with the nearest options of ours where one is unknown, and for a word that nothing takes."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            unknown = next((word for word in rest if word.startswith("-")), rest[0])
            unknown = unknown.partition("=")[0] if unknown.startswith("-") else unknown
            ours = [name for name in self._option_string_actions if name.startswith("--")]
            near = difflib.get_close_matches(unknown[:LONGEST_PART], ours, n=MAX_SUGGESTIONS, cutoff=0.5)
            reason = "no such option" if unknown.startswith("-") else "unexpected argument"
            self.error("; similar: ".join([f"{unknown}: {reason}", *([", ".join(near)] if near else [])]))
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is none of the choices, and name the one that is nearest."""
        if action.choices is not None and value not in action.choices:
            choices = [*map(str, action.choices)]
            hint = nearest(str(value), choices)
            if action.nargs == argparse.PARSER and Path(str(value)).suffix:  # a file
                hint = f"; write one of {', '.join(choices)} before it"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """Ends with 2 and one line; what it quotes is not obeyed by the terminal."""
        commands = next((action.choices for action in self._actions if action.nargs == argparse.PARSER), None)
        if message.lower().endswith("required: command") and commands:
            aliases = {id(parser): name for name, parser in reversed(dict(commands).items())}
            message = f"{message}; valid: {', '.join(reversed(aliases.values()))}"
        if CONFIG in message.split() and "required" in message:
            message = f"{message}; write the YAML of the run first: {self.prog} run.yaml"
        self.exit(UserError.exit_code, f"error: {visible(bounded(message))}; {self.prog} --help lists the options\n")


def _is_value(word: str) -> bool:
    return not word.startswith("-") or NEGATIVE.match(word) is not None


def run_command(main: Callable[[Sequence[str] | None], int | None], arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs ``main`` and ends with its exit code; mistakes of the user are printed without a traceback.

    Without ``arguments`` it runs the command line of this process, which it leaves (:mod:`mindllm.process.exit_hooks`); with
    them it raises SystemExit, or an error that is none of the user's, in whatever program calls it.
    """
    if arguments is not None:
        sys.exit(exit_code(main, arguments))
    gc.set_threshold(*SEARCHES_FOR_GARBAGE)
    try:
        code = exit_code(main)
    except SystemExit as end:  # a parser's, which has said why
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            error_console.print(visible(end.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = RunFailed.exit_code
    leave(code)


def exit_code(main: Callable[[Sequence[str] | None], int | None], arguments: Sequence[str] | None = None) -> int:
    """Runs ``main`` and returns the exit code, when all that was printed is written and a mistake of the user is told."""
    if sys.stdout is None:  # closed by who has started this
        sys.stdout = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal has no character for is escaped, not a traceback
            stream.reconfigure(errors="backslashreplace")
    raise_on_interrupt()
    try:
        code = main(arguments) or 0
        sys.stdout.flush()
    except (UserError, RunFailed, CheckFailed) as error:
        error_console.print(styled(("error:", "bold red"), f" {bounded(str(error))}"))
        code = error.exit_code
    except KeyboardInterrupt:
        error_console.print(interrupt_word())
        leave_nothing_behind()
        code = INTERRUPTED
    except BrokenPipeError:
        code = READER_GONE
    except OSError as error:
        if error.errno is None:
            raise
        error_console.print(styled(("error:", "bold red"), f" {_of_system(error)}"))
        code = UserError.exit_code if error.errno in IMPOSSIBLE else RunFailed.exit_code
    except ModuleNotFoundError as error:
        if not (said := advice(error)):
            raise
        error_console.print(styled(("error:", "bold red"), f" {said}"))
        code = UserError.exit_code
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        error_console.print(styled(("error:", "bold red"), f" not enough memory{reason}; ask for less at a time"))
        code = RunFailed.exit_code
    leave_on_interrupt()
    if code == INTERRUPTED:
        code = interrupt_code()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = READER_GONE
    except OSError:  # a full disk, told above; where something else had failed before, that counts
        code = code or RunFailed.exit_code
    if code == READER_GONE:  # nothing more can be written there, not even by the interpreter when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _of_system(error: OSError) -> str:
    names = [bounded(str(name), LONGEST_PART) for name in (error.filename, error.filename2) if name is not None]
    said = ": ".join([" -> ".join(names), error.strerror or str(error)]) if names else error.strerror or str(error)
    return f"{said}; make room there, or write elsewhere" if error.errno in FULL else said


def positive(text: str) -> int:
    """A whole number from 1 on, as the type of an option."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def port(text: str) -> int:
    """A TCP port, as the type of an option."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port; ports are 1 to {LARGEST_PORT}")
    return int(text)


def duration(text: str) -> float:
    """Seconds above 0, as the type of an option."""
    value = _seconds(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def patience(text: str) -> float:
    """Seconds from 0 on, as the type of an option."""
    value = _seconds(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return value


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def output_file(text: str) -> Path:
    """Return a file to write, as the type of an option. One that cannot be written is refused before any work is done."""
    if text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text}: is a directory; this option takes a file")
    return _writable(text, directory=False)


def output_directory(text: str) -> Path:
    """Return a directory to write into, made where it is missing; as :func:`output_file`."""
    if Path(text).suffix.lower() in FILE_SUFFIXES and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is the name of a file; this option takes a directory")
    return _writable(text, directory=True)


def _writable(text: str, directory: bool) -> Path:
    if why := obstacle(text, directory):
        raise argparse.ArgumentTypeError(f"{text}: {why}")
    return Path(text)
