"""``metrics.jsonl``: one strict JSON object per training step, readable line by line while the run goes on.

Each line is one ``write``, so ``kill -9`` tears at most the last one, which the next opening cuts off. Numbers that are
not finite become ``null``: every JSON parser reads the file and numeric columns stay numeric.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindllm.files import atomic_open, naming
from mindllm.outside import open_file, parse_json
from mindllm.terminal.json_text import strict

METRICS_NAME = "metrics.jsonl"  # below the output directory
logger = logging.getLogger(__name__)


class MetricsFile:
    """The metrics of one run, open for appending; a context manager. One process writes."""

    def __init__(self, path: Path | str) -> None:
        """Opens or creates ``path`` (with its directory) and cuts off a last line that was not written to its end."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes ``record`` (must hold an integer ``step``; values may be numpy scalars) as one line.

        Raises:
            OSError: the line could not be written, for instance to a full disk; the file is left without a part of it.
        """
        plain = strict(record, not_finite=lambda _: None)
        if not isinstance(plain.get("step"), int):
            raise ValueError(f"a metrics record needs an integer 'step', got {record.get('step')!r}")
        line = json.dumps(plain, allow_nan=False).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            with naming(self.path):
                rest = memoryview(line)
                while rest:  # a disk that becomes full takes a part first
                    rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(size)
            raise

    def is_in_place(self) -> bool:
        """Whether what is appended can be found under ``path``: not where the file, or its directory, was deleted or moved."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def rewind(self, step: int) -> None:
        """Drops every line of a step after ``step``, atomically: what a run that resumes there will write again."""
        with atomic_open(self.path, "wb") as kept:
            for line, record in _records(self.path):
                if record["step"] <= step:
                    kept.write(line)
        self.close()
        self._open()

    def sync(self) -> None:
        """Flushes the file to the disk. Called before a checkpoint, a power failure loses no step up to it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; what was appended stays."""
        self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (closed by close())
        self._file.truncate(_end_of_last_line(self.path))


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Returns the records of ``path`` in the order of the file; a torn last line is left out, ``null`` is ``None``."""
    return [record for _, record in _records(Path(path))]


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields whole lines with what they hold; drops, with a warning, lines that hold no record (a power failure leaves zeros)."""
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = parse_json(line)
                if isinstance(record["step"], int):
                    yield line, record
                    continue
            except (ValueError, TypeError, KeyError):
                pass
            logger.warning("%s: line %d is not a metrics record and is dropped", path, number)


def _end_of_last_line(path: Path, block: int = 1 << 16) -> int:
    with open(path, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position:
            start = max(0, position - block)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
    return 0
