"""Source files of documents and their order, records as documents, and the fingerprint of an up-to-date corpus."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from mindllm.data.chat.conversations import alpaca
from mindllm.data.records import Record
from mindllm.errors import UserError, nearest

# Directories and files of the Python installation that are not the library's own source, or are its tests.
STDLIB_EXCLUDED = (
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "_bundled",
    "config-*",
    "_sysconfigdata*",
)


@dataclass(frozen=True)
class Source:
    """One file: its path, the name it is sorted by, its size in bytes and time of change in nanoseconds."""

    name: str
    path: str
    size: int
    mtime_ns: int


def find_sources(inputs: Sequence[Path], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Source]:
    """Return the files of ``inputs``, sorted by name, each once: files as given, directories with all below them.

    In directories, ``include`` (none: all) and ``exclude`` hold shell patterns: one with a slash is compared with the path
    below the directory, one without with the file's name and, to exclude, with each directory's. Hidden files and links are
    not followed. Raises UserError for an input that does not exist and an ``include`` that matches no file.
    """
    sources: dict[str, Source] = {}
    matched: set[str] = set()
    for root in inputs:
        if not root.exists():
            raise UserError(f"{root}: no such file or directory")
        for path in _walk(root, include, exclude, matched) if root.is_dir() else [root]:
            name = f"{root.resolve().name}/{path.relative_to(root).as_posix()}" if path != root else root.name
            status = path.stat()
            sources.setdefault(
                str(path.resolve()), Source(name, str(path.absolute()), status.st_size, status.st_mtime_ns)
            )
    unused = [pattern for pattern in include if pattern not in matched]
    if unused:
        raise UserError(f"--include '{unused[0]}' matches no file in {', '.join(map(str, inputs))}")
    if not sources:
        raise UserError(f"{', '.join(map(str, inputs))}: no files to read")
    return sorted(sources.values(), key=lambda source: (source.name, source.path))


def python_standard_library() -> list[Source]:
    """Return the source files of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "os.py").is_file():
        raise UserError(
            f"{root}: this Python comes without the source of its standard library; give text files instead"
        )
    return find_sources([root], include=["*.py"], exclude=STDLIB_EXCLUDED)


def shuffled(sources: list[Source], seed: int) -> list[Source]:
    """Return ``sources`` in an order drawn by ``seed``, so that the consecutive documents of a split are a fair sample."""
    order = np.arange(len(sources))
    np.random.RandomState(seed).shuffle(order)
    return [sources[index] for index in order]


def fingerprint(sources: Iterable[Source], **options: object) -> str:
    """Return a hash of names, sizes and times of ``sources`` in their order, and of ``options``."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for source in sources:
        digest.update(json.dumps([source.name, source.size, source.mtime_ns]).encode())
    return digest.hexdigest()


def _walk(root: Path, include: Sequence[str], exclude: Sequence[str], matched: set[str]) -> Iterator[Path]:
    for directory, directories, names in os.walk(root, onerror=_refuse):
        parent = Path(directory)
        directories[:] = [name for name in directories if not _is_skipped(parent / name, root, exclude)]
        for path in (parent / name for name in names):
            if _is_skipped(path, root, exclude) or not path.is_file():
                continue
            patterns = [pattern for pattern in include if _matches(path, root, pattern)]
            matched.update(patterns)
            if patterns or not include:
                yield path


def _is_skipped(path: Path, root: Path, exclude: Sequence[str]) -> bool:
    return path.name.startswith(".") or path.is_symlink() or any(_matches(path, root, pattern) for pattern in exclude)


def _matches(path: Path, root: Path, pattern: str) -> bool:
    return fnmatchcase(path.relative_to(root).as_posix() if "/" in pattern else path.name, pattern)


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror})")


@dataclass(frozen=True)
class DocumentReader:
    """Makes a document of a record: the texts of ``keys``, or what ``handler`` makes of it."""

    keys: tuple[str, ...] = ("text",)
    handler: str = "GeneralPretrainHandler"

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the keys that are read; empty if the handler chooses them by record."""
        return self.keys if self.handler == "GeneralPretrainHandler" else ()

    def text(self, record: Record, place: str) -> str:
        """Return the text of ``record``; raises UserError, naming it as ``place``, where keys are missing or no text."""
        try:
            parts = HANDLERS[self.handler](record, self.keys)
        except KeyError as error:
            raise UserError(
                f"{place}: has no key {error}{nearest(str(error).strip(chr(39)), record)}; name the keys with --json-keys, or "
                "read files as they are with --format text"
            ) from None
        except (TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{place}: not a record for {self.handler} ({error})") from None
        wrong = next((part for part in parts if not isinstance(part, str)), None)
        if wrong is not None:
            raise UserError(
                f"{place}: holds {repr(wrong)[:40]} where a text should be; name other keys with --json-keys"
            )
        return "\n".join(parts)


def general(record: Record, keys: Sequence[str]) -> list[str]:
    """Return the texts of ``keys``, joined by line breaks; null is skipped."""
    return [record[key] for key in keys if record[key] is not None]


def alpaca_pretrain(record: Record, keys: Sequence[str]) -> list[str]:
    """Return an alpaca row as running text: every part under a heading, as in the plain chat template."""
    headings = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    return ["\n\n".join(headings[message["role"]] + message["content"] for message in alpaca(record))]


def stack_overflow_python(record: Record, keys: Sequence[str]) -> list[str]:
    """Return a question about Python of Stack Overflow with its answer."""
    return [
        f"In python, {record['title']}\n### Question:\n{record['question_body']}\n### Response:\n{record['answer_body']}\n"
    ]


HANDLERS: Mapping[str, Callable[[Record, Sequence[str]], list[str]]] = {
    "GeneralPretrainHandler": general,
    "AlpacaPretrainHandler": alpaca_pretrain,
    "StackOverflowPythonPretrainHandler": stack_overflow_python,
}
