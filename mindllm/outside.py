"""Files of others: the one place that opens them. Regular files alone, of bounded size, in one form of error.

A FIFO would be waited for without end; a device, a sparse file or a compressed file of zeros is larger than any memory. What is
wrong with a file is a :class:`FileRefusedError`, an ``OSError`` whose ``strerror`` says it in plain words.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import logging
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mindllm.terminal.text import visible
from mindllm.units import MIB

LARGEST = 256 * MIB
"""Of a file that is read whole; the largest public ``tokenizer.json`` has 33 MB."""
LARGEST_YAML = 1 * MIB
"""PyYAML takes seconds for it; public run files have some kilobytes."""
LARGEST_GRAPH = 2048 * MIB
"""What protobuf takes; also of a text of a graph, and of what a dry run recorded once it is decompressed."""
LARGEST_LINE = 16 * MIB
"""Of a file that a command of ours extends line by line."""
DEEPEST = 200
"""Levels of lists and objects in JSON: a program that walks down a tree can walk down this one."""
TOO_DEEP = f"nested more than {DEEPEST} levels deep, or holds itself"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Half of a pair, written as an escape or come from bytes that are no UTF-8."""
KINDS: dict[str, Callable[[int], bool]] = {
    "a directory": stat.S_ISDIR,
    "a FIFO": stat.S_ISFIFO,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    "a socket": stat.S_ISSOCK,
}
HANDED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""What whoever started this process opened for it, as ``<(...)`` of a shell does: it may be a pipe."""
Line = TypeVar("Line")
csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a document is one field


class FileRefusedError(OSError):
    """A file that is not read; ``strerror`` says why, ``filename`` which one."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, os.fspath(path))
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def open_file(path: Path | str) -> io.BufferedReader:
    """Opens a regular file, or a pipe that the shell handed over, for reading bytes.

    Raises:
        OSError: it is not there or cannot be opened; a FileRefusedError where it is something else than a file.
    """
    handed = os.fspath(path).startswith(HANDED)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if handed else os.O_NONBLOCK))
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise FileRefusedError(ascii(path), f"is no path ({error})") from None
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FileRefusedError(path, "is a socket, not a file") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or (handed and stat.S_ISFIFO(mode))):
        os.close(descriptor)
        kind = next((name for name, holds in KINDS.items() if holds(mode)), "something else")
        raise FileRefusedError(path, f"is {kind}, not a file")
    return open(descriptor, "rb")


def read_bytes(path: Path | str, most: int = LARGEST) -> bytes:
    """The content of a file of at most so many bytes; raises as :func:`open_file`, and for a larger one."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        raise FileRefusedError(path, f"has {max(size, len(content)):,} bytes; at most {most:,} are read")
    return content


def read_text(path: Path | str, most: int = LARGEST) -> str:
    """The text in UTF-8 that a file holds, with line feeds alone; raises as :func:`read_bytes`, and where it is none."""
    content = read_bytes(path, most)
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise FileRefusedError(path, f"not a text file in UTF-8 ({_first_other_byte(content)})") from None


def read_json(path: Path | str, most: int = LARGEST) -> Any:
    """The value that a file of JSON holds; raises as :func:`read_bytes`, and where it is none."""
    return _parsed(path, read_bytes(path, most))


def read_compressed_json(path: Path | str, most: int = LARGEST_GRAPH) -> Any:
    """The value that a gzip file of JSON holds, of at most so many bytes once decompressed; raises as :func:`read_json`."""
    try:
        with open_file(path) as file, gzip.GzipFile(fileobj=file) as unpacked:
            content = unpacked.read(most + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise FileRefusedError(path, f"not a compressed file, or damaged ({error})") from None
    if len(content) > most:
        raise FileRefusedError(path, f"has more than {most:,} bytes once decompressed")
    return _parsed(path, content)


def read_rows(path: Path | str, most: int = LARGEST) -> list[dict[str, str]]:
    """The rows of a CSV by the names in its first line; of a short row, what is missing is empty.

    Raises:
        OSError: as :func:`read_text`, or quotes that are not closed.
    """
    reader = csv.DictReader(io.StringIO(read_text(path, most), newline=""), restval="", strict=True)
    try:
        return list(reader)
    except csv.Error as error:
        raise FileRefusedError(path, f"line {reader.line_num}: {error}") from None


def bounded_lines(file: Any, most: int, place: Path | str) -> Iterator[Any]:
    """The lines of an opened file, none of which is longer than ``most``: more is held by none; raises FileRefusedError."""
    for number, line in enumerate(iter(lambda: file.readline(most + 1), file.read(0)), start=1):
        if len(line) > most:
            raise FileRefusedError(place, f"line {number} has more than {most // MIB:,} MB")
        yield line


def read_kept_lines(path: Path | str, read: Callable[[Any], Line]) -> list[Line]:
    """Return what ``read`` makes of each line of JSON in a file that a command of ours extends and reads again.

    Damaged lines are dropped, as after a crash, and one warning counts them: lines that are not JSON, and those for which
    ``read`` raises ValueError, KeyError or TypeError.

    Raises:
        OSError: as :func:`open_file`; a FileRefusedError if the file has complete lines and all of them are damaged, since it
            is a different kind of file.
    """
    lines, damaged, is_other = list[Line](), list[int](), False
    with open_file(path) as file:
        for number, text in enumerate(bounded_lines(file, LARGEST_LINE, path), start=1):
            if not text.strip():
                continue
            try:
                lines.append(read(parse_json(text)))
            except (ValueError, KeyError, TypeError):
                damaged.append(number)
                is_other = is_other or text.endswith(b"\n")
    if is_other and not lines:
        raise FileRefusedError(
            path, f"line {damaged[0]} was not written by mindllm; remove the file or use another directory"
        )
    if damaged:
        count = "1 damaged line" if len(damaged) == 1 else f"{len(damaged):,} damaged lines"
        logging.getLogger(__name__).warning("%s", visible(f"{path}: ignored {count} (first: line {damaged[0]})"))
    return lines


def append_lines(path: Path | str) -> io.TextIOWrapper:
    """Open a file of kept lines for appending; an unfinished last line is closed, so that only it is lost."""
    file = open(path, "ab+")  # noqa: SIM115 (the caller closes it)
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


def parse_json(content: bytes | str) -> Any:
    r"""The value that ``content`` (UTF-8, perhaps with a byte order mark) is.

    Raises:
        ValueError: it is no JSON, is nested too deeply, has an integer of thousands of digits, or a text with half a surrogate
            pair (``"\ud800"``), which no tokenizer and no file takes.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        tree = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; save it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:  # the only other one: of converting digits
        raise ValueError("an integer of thousands of digits") from None
    if is_deeper(tree):
        raise ValueError("nested too deeply")
    if SURROGATE.search(text) and (half := half_surrogate(json.dumps(tree, ensure_ascii=False))):
        raise ValueError(f"half of a surrogate pair ({half}) in a text")
    return tree


def half_surrogate(text: str) -> str:
    r"""The first half of a surrogate pair in ``text``, as ``\ud800``; empty where there is none, and ``text`` is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return ""


def _parsed(path: Path | str, content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise FileRefusedError(path, f"not JSON: {error}") from None


def _first_other_byte(content: bytes) -> str:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"line {content[: error.start].count(10) + 1}, byte {content[error.start]:#04x}"
    return ""


def is_deeper(tree: Any, most: int = DEEPEST) -> bool:
    """Return True if dictionaries and lists are nested in more levels; level by level, each of them once."""
    inside = [tree] if isinstance(tree, Mapping | list | tuple) else []
    for _ in range(most):
        found = (item for outer in inside for item in (outer.values() if isinstance(outer, Mapping) else outer))
        inside = [*{id(item): item for item in found if isinstance(item, Mapping | list | tuple)}.values()]
        if not inside:
            return False
    return True
