"""Files of records (jsonl, json, csv, tsv, parquet), plain or compressed (gz, bz2, xz, zst): as a stream, or by index.

Streams have one record in memory (for parquet a row group). A .json file with one value is read completely: an array of records,
or an object with one under a key such as ``data``. pyarrow and zstandard are imported if a file needs them.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from mindllm.errors import UserError
from mindllm.files import unexpanded
from mindllm.outside import FileRefusedError, bounded_lines, open_file, parse_json

Record = dict[str, Any]

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KINDS = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
DAMAGE = (OSError, EOFError, csv.Error, lzma.LZMAError, zlib.error)
LIBRARY_ERRORS = ("ZstdError", "ArrowInvalid")  # by name, as the libraries are imported where a file needs them
PARQUET_BATCH = 1024  # records decoded at a time
LINE_BYTES = 512 << 20  # of one record; it is held several times while it is parsed
LARGEST_JSON = 1 << 30  # bytes of a .json file that is one value; it is parsed as a whole
ROWS = ("data", "rows", "records", "examples", "instances", "train", "validation", "test")
"""Keys under which an object that is a whole file has its records."""


def compression_suffix(path: Path | str) -> str | None:
    """Return the suffix of a compressed file, such as ".gz"; None for a plain file."""
    suffix = Path(path).suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def kind_of(path: Path | str) -> str | None:
    """Return which kind of records a file holds, by its ending before that of a compression; None for other files."""
    path = Path(path)
    return KINDS.get((path.with_suffix("") if compression_suffix(path) else path).suffix.lower())


def open_bytes(path: Path | str) -> BinaryIO:
    """Open a file for reading bytes; decompress it according to its suffix."""
    compression = compression_suffix(path)
    if compression == ".gz":
        return cast(BinaryIO, gzip.open(open_file(path), "rb"))
    if compression == ".bz2":
        return cast(BinaryIO, bz2.open(open_file(path), "rb"))
    if compression == ".xz":
        return cast(BinaryIO, lzma.open(open_file(path), "rb"))
    if compression == ".zst":
        import zstandard

        return cast(BinaryIO, io.BufferedReader(zstandard.open(open_file(path), "rb")))
    return open_file(path)


def read_records(path: Path | str, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the records of a file in order; raise UserError naming file and line of an invalid record.

    ``columns``: the columns to read, if the file format can skip others (parquet, if it has them all).
    """
    kind = kind_of(path)
    if kind is None:
        raise UserError(
            f"{path}: not a file of records; readable are {', '.join(KINDS)}, also as {', '.join(COMPRESSIONS)}"
        )
    with reading(path):
        if kind == "parquet":
            yield from _parquet(path, columns)
        elif kind in ("csv", "tsv"):
            yield from _csv(path, "\t" if kind == "tsv" else ",")
        elif kind == "json" and _is_single_value(path):
            yield from _json_value(path)
        else:
            with open_bytes(path) as file:
                for number, line in enumerate(bounded_lines(file, LINE_BYTES, path), start=1):
                    if line.strip():
                        yield parse_record(line, f"{path}:{number}")


def parse_record(line: bytes, place: str) -> Record:
    """Return the JSON object of one line; ``place`` names it in errors."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place}: not a line of JSON ({error})") from None
    return _object(record, place)


def _object(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        kind = {list: "a list", str: "a text", type(None): "null"}.get(type(record), str(record)[:40])
        raise UserError(f"{place}: a record is a JSON object, not {kind}")
    return record


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Raise UserError naming the file for errors of libraries about a missing, damaged or truncated file."""
    try:
        yield
    except FileRefusedError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.object[error.start]:#04x}); save it as UTF-8") from error
    except Exception as error:
        if not isinstance(error, DAMAGE) and type(error).__name__ not in LIBRARY_ERRORS:
            raise
        raise UserError(f"{path}: damaged, or not what its name says ({error})") from error


def _csv(path: Path | str, delimiter: str) -> Iterator[Record]:
    with open_bytes(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(bounded_lines(text, LINE_BYTES, path), delimiter=delimiter, strict=True)
        # a header that has another separator than this kind of file
        names = list(rows.fieldnames or ())
        separator = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), "")
        if separator:
            raise UserError(
                f"{path}:1: its columns are separated by {separator!r}, which is read as one column ({names[0]}); "
                f"write {delimiter!r} between them{', or name the file .tsv' if separator == chr(9) else ''}"
            )
        for row in rows:
            if None in row or None in row.values():
                count = len(rows.fieldnames or ())
                raise UserError(
                    f"{path}:{rows.line_num}: the header names {count} columns, this row has another number"
                )
            yield cast(Record, row)


def _parquet(path: Path | str, columns: Sequence[str]) -> Iterator[Record]:
    import pyarrow.parquet as parquet

    with open_file(path) as opened, parquet.ParquetFile(opened) as file:
        selected = list(columns) if columns and set(columns) <= set(file.schema_arrow.names) else None
        for batch in file.iter_batches(batch_size=PARQUET_BATCH, columns=selected):
            yield from (
                {key: _without_null_fields(value) for key, value in record.items()} for record in batch.to_pylist()
            )


def _without_null_fields(value: Any) -> Any:
    """Return a value without the null entries of objects: a parquet column gives every object the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_null_fields(entry) for key, entry in value.items() if entry is not None}
    return [_without_null_fields(entry) for entry in value] if isinstance(value, list) else value


def _is_single_value(path: Path | str) -> bool:
    """Return True if a .json file is one array or object instead of one record per line."""
    with open_bytes(path) as file:
        lines = (line for line in bounded_lines(file, LARGEST_JSON, path) if line.strip())
        first, second = next(lines, b""), next(lines, None)
    if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") or (first and second is None):
        return True
    try:
        parse_json(first)
    except ValueError:  # an object over several lines
        return first.lstrip().startswith(b"{")
    return False


def _json_value(path: Path | str) -> Iterator[Record]:
    with open_bytes(path) as file:
        try:
            content = file.read(LARGEST_JSON + 1)
            if len(content) > LARGEST_JSON:
                raise UserError(
                    f"{path}: is one value of more than {LARGEST_JSON >> 20} MB; write a record a line (.jsonl)"
                )
            records = parse_json(content)
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error})") from None
    records = records if isinstance(records, list) else _rows(_object(records, str(path)), path)
    for number, record in enumerate(records, start=1):
        yield _object(record, f"{path}: record {number}")


def _rows(tree: dict[str, Any], path: Path | str) -> list[Any]:
    """Return the records under the one key of an object, as in ``{"data": [...]}``; otherwise the object itself.

    Raises:
        UserError: the object has several lists of records.
    """
    lists = [
        key for key in ROWS if isinstance(rows := tree.get(key), list) and all(isinstance(row, dict) for row in rows)
    ]
    if len(lists) > 1:
        raise UserError(f"{path}: holds records under {', '.join(lists)}; write each list to a separate file")
    return tree[lists[0]] if lists else [tree]


class RecordFile(Protocol):
    """Records of one file by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Record: ...

    def name(self, number: int) -> str:
        """Return the name of a record for people."""


class JsonLines:
    """A plain jsonl file of which only the offsets of lines are in memory: 16 bytes per record."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        starts, lines = [], []
        with reading(path), open_file(path) as file:
            position = 0
            for number, line in enumerate(bounded_lines(file, LINE_BYTES, path), start=1):
                if line.strip():
                    starts.append(position)
                    lines.append(number)
                position += len(line)
        self._starts, self._lines = np.array(starts, dtype=np.int64), np.array(lines, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Record:
        with reading(self.path), open_file(self.path) as file:
            file.seek(int(self._starts[number]))
            return parse_record(file.readline(), self.name(number))

    def name(self, number: int) -> str:
        """Return the line of a record, as editors count them."""
        return f"{self.path}:{self._lines[number]}"


class Records:
    """The records of a file of another kind, held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = list(read_records(path))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Record:
        return self._records[number]

    def name(self, number: int) -> str:
        """Return the file and the number of the record, from 1."""
        return f"{self.path}: record {number + 1}"


class RecordTable:
    """The records of several files, one file after another; files other than plain jsonl are held in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._files: list[RecordFile] = [_by_number(path) for path in paths]
        self._ends = np.cumsum([len(file) for file in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, number - (int(self._ends[file - 1]) if file else 0)

    def __getitem__(self, number: int) -> Record:
        file, place = self._place(number)
        return self._files[file][place]

    def name(self, number: int) -> str:
        """Return the name of a record for people: its file, and its line or number, from 1."""
        file, place = self._place(number)
        return self._files[file].name(place)


def _by_number(path: Path) -> RecordFile:
    if kind_of(path) == "jsonl" and compression_suffix(path) is None:
        return JsonLines(path)
    return Records(path)


def record_files(paths: Sequence[str]) -> list[Path]:
    """Return the files named, directories replaced by the record files below them in the order of their names."""
    files: list[Path] = []
    for source in map(Path, paths):
        if not source.exists():
            raise UserError(f"{source}: no such file or directory{unexpanded(source)}")
        below = (
            sorted(path for path in source.rglob("*") if path.is_file() and kind_of(path))
            if source.is_dir()
            else [source]
        )
        if not below:
            raise UserError(f"{source}: no files of records in this directory ({', '.join(KINDS)})")
        files += below
    return files
