"""``metrics.jsonl``: one strict JSON object per training step, readable during the run.

Each line is one ``write``, so ``kill -9`` leaves at most the last line incomplete, and opening the file removes it. Numbers that
are not finite become ``null``, which every JSON parser reads.
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
    """Metrics of one run, open for appending. Only one process may write. Usable as a context manager."""

    def __init__(self, path: Path | str) -> None:
        """Open or create ``path`` and its directory, and remove an incomplete last line."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append ``record``, which has an integer ``step``, as one line. Values may be numpy scalars.

        Raises:
            OSError: the line could not be written, for instance to a full disk. The file is unchanged then.
        """
        plain = strict(record, not_finite=lambda _: None)
        if not isinstance(plain.get("step"), int):
            raise ValueError(f"a metrics record needs an integer 'step', got {record.get('step')!r}")
        line = json.dumps(plain, allow_nan=False).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            with naming(self.path):
                pending = memoryview(line)
                while pending:  # a disk that becomes full writes a part first
                    pending = pending[self._file.write(pending) :]
        except OSError:
            self._file.truncate(size)
            raise

    def is_in_place(self) -> bool:
        """Return True if ``path`` is still the open file, which was not deleted or moved."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def rewind(self, step: int) -> None:
        """Remove the records after ``step``, atomically. A run that resumes there writes them again."""
        with atomic_open(self.path, "wb") as file:
            for line, record in _records(self.path):
                if record["step"] <= step:
                    file.write(line)
        self.close()
        self._open()

    def sync(self) -> None:
        """Flush the file to disk. Called before a checkpoint, so that a power failure loses no earlier step."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (closed by close())
        self._file.truncate(_end_of_last_line(self.path))


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the records of ``path`` in file order, without an incomplete last line. ``null`` becomes None."""
    return [record for _, record in _records(Path(path))]


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield complete lines and their records. Other lines are skipped with a warning (a power failure leaves zeros)."""
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
            logger.warning("%s: line %d is not a metrics record and is ignored", path, number)


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
