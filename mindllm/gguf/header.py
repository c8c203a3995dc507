"""The header of a GGUF file: keys, values and the places of tensors. Nothing else of the file is read.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. Every count and
length is checked against the remaining file before it is used. Arrays are skipped and read on request; texts and tensors have
a total limit. A header therefore takes at most about 200 MB of memory.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mindllm.errors import UserError, shortened
from mindllm.outside import FileRefusedError, open_file
from mindllm.units import MIB

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_HEADER = 256 * MIB
LARGEST_ARRAY = 64 * MIB  # the largest public vocabularies, with their merges, take 15 MB
LONGEST_TEXT = 16 * MIB
MOST_TEXT = 32 * MIB  # total of all names and values
LONGEST_NAME = 1024
MOST_KEYS = 1 << 16
MOST_TENSORS = 1 << 16
MOST_ENTRIES = 1 << 22  # in an array of numbers, and total of all arrays of texts
MOST_DIMENSIONS = 4
LENGTH, BLOCK = struct.Struct("<Q"), 1 << 16  # length of a text; bytes read at a time to skip texts
LARGEST_ALIGNMENT = 1 << 20
MOST_PARTS = 1000
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
TEXT, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
}
TYPES: dict[int, tuple[str, int, int]] = {  # name, values of a block, bytes of a block
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    **{14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98)},
    **{19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82)},
    **{23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66)},
    **{39: ("MXFP4", 32, 17)},
}
"""Supported types: plain numbers, and codes that the package ``gguf`` dequantizes."""


@dataclass(frozen=True)
class StoredBlocks:
    """A tensor of a file: its type by name, its shape in PyTorch's order, and the place of its bytes."""

    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class StoredArray:
    """An array of a header, read on request: its type, its number of entries, and the place of its bytes."""

    path: Path
    kind: int
    count: int
    offset: int
    size: int

    def read(self) -> list[Any]:
        """Return the entries. Bytes of a text that are not UTF-8 (tokens may have some) become U+FFFD.

        Raises:
            ValueError: the array is too large, or the file has changed.
            OSError: the file cannot be read.
        """
        if self.size > LARGEST_ARRAY:
            raise ValueError(f"an array of {self.size:,} bytes exceeds the limit of {LARGEST_ARRAY:,}")
        with open_file(self.path) as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if self.kind != TEXT:
            values = np.frombuffer(content, NUMBERS[self.kind], self.count)
            return values.astype(bool).tolist() if self.kind == BOOL else values.tolist()
        entries, start = [], 0
        for _ in range(self.count):
            end = start + 8 + int.from_bytes(content[start : start + 8], "little")
            entries.append(content[start + 8 : end].decode(errors="replace"))
            start = end
        return entries


@dataclass(frozen=True)
class Header:
    """Keys and tensors of a file. Values are texts, numbers and arrays; ``tensors`` includes all parts of a split model."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, StoredBlocks]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of ``key`` (an array as a list), or ``default`` if it is absent.

        Raises:
            UserError: the value has another type, or is an array that is too large.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, StoredArray):
            try:
                value = value.read()
            except (OSError, ValueError) as error:
                raise UserError(f"{self.path}: {key}: cannot be read ({error})") from None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            types = " or ".join(item.__name__ for item in (kind if isinstance(kind, tuple) else (kind,)))
            raise UserError(f"{self.path}: {key}: must be of type {types} (value {shortened(value)})")
        return value

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``, or an empty string."""
        return self.get("general.architecture", str, "")


def gguf_file(path: Path | str) -> Path | None:
    """Return ``path`` if it is a GGUF file, or the only GGUF file of a directory without ``config.json``, or None.

    A file named ``mmproj…`` is the vision part of a model and is ignored. A split model counts as its first part.
    """
    if not str(path):
        return None
    path = Path(path)
    if path.is_file():
        if path.suffix.lower() == SUFFIX:
            return path
        try:
            with open_file(path) as file:
                return path if file.read(len(MAGIC)) == MAGIC else None
        except OSError:
            return None
    files = gguf_files(path)
    return files[0] if len(files) == 1 else None


def gguf_files(directory: Path) -> list[Path]:
    """Return the GGUF files of a directory without a ``config.json`` and without the manifest of a checkpoint."""
    if not directory.is_dir() or any((directory / name).exists() for name in ("config.json", "manifest.json")):
        return []
    files = (file for file in directory.glob(f"*{SUFFIX}") if file.is_file() and not file.name.startswith("mmproj"))
    return sorted(file for file in files if not (part := PART.search(file.name)) or int(part[1]) == 1)


def read_header(path: Path) -> Header:
    """Return the header of the file at ``path``, including the tensors of all parts of a split model.

    Raises:
        UserError: the file is not GGUF, is damaged or incomplete, or has an unsupported version or type.
    """
    try:
        stat = path.stat()
        header = _read(path, stat.st_size, stat.st_mtime_ns)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except FileRefusedError as error:
        raise UserError(f"{path}: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not a GGUF file, or incomplete ({error}); download it again") from None
    return _add_parts(header)


def _add_parts(header: Header) -> Header:
    """Add the tensors of the other parts to the header of a split model's first part."""
    count, number = header.get("split.count", int, 0), header.get("split.no", int, 0)
    if count <= 1 or number > 0:
        return header
    part = PART.search(header.path.name)
    if part is None or (int(part[1]), int(part[2])) != (1, count) or count > MOST_PARTS:
        raise UserError(
            f"{header.path}: the first of {count} parts of a model, which must be named NAME-00001-of-{count:05d}{SUFFIX}"
        )
    tensors = dict(header.tensors)
    for index in range(2, count + 1):
        path = header.path.with_name(f"{header.path.name[: part.start()]}-{index:05d}-of-{count:05d}{SUFFIX}")
        part_header = read_header(path)
        if part_header.get("split.no", int, 0) != index - 1 or tensors.keys() & part_header.tensors.keys():
            raise UserError(f"{path}: is not part {index} of {header.path.name}; download it again")
        tensors |= part_header.tensors
        if len(tensors) > MOST_TENSORS:
            raise UserError(f"{header.path}: its parts have over {MOST_TENSORS:,} tensors")
    count = header.get("split.tensors.count", int, len(tensors))
    if count != len(tensors):
        raise UserError(f"{header.path}: its parts have {len(tensors)} tensors instead of {count}; download them again")
    return Header(header.path, header.values, tensors)


@lru_cache(maxsize=8)
def _read(path: Path, size: int, _changed: int) -> Header:
    with open_file(path) as file:
        return HeaderReader(file, path, size).header()


class HeaderReader:
    """Sequential reader, bounded by the end of the file and ``LARGEST_HEADER``. Raises ValueError for damage."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.remaining = min(size, LARGEST_HEADER)
        self.remaining_text, self.remaining_entries = MOST_TEXT, MOST_ENTRIES

    def header(self) -> Header:
        """Read the whole header."""
        if (magic := self.take(4)) != MAGIC:
            raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
        version = self.number("<u4")
        if version not in VERSIONS:
            order = ", big endian" if version in (v << 24 for v in (1, *VERSIONS)) else ""
            raise UserError(
                f"{self.path}: GGUF version {version}{order} is unsupported; supported are 2 and 3, little endian"
            )
        tensors, keys = self.count("tensors", MOST_TENSORS), self.count("keys", MOST_KEYS)
        values: dict[str, Any] = {}
        for _ in range(keys):
            name = self.text(LONGEST_NAME)
            values[name] = self.value(self.number("<u4"), name)
        descriptions = [self.tensor_description() for _ in range(tensors)]
        return Header(self.path, values, self.place_tensors(descriptions, values.get("general.alignment", 32)))

    def take(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        self.require(size)
        content = self.file.read(size)
        if len(content) != size:
            raise ValueError("it is truncated")
        self.remaining -= size
        return content

    def skip(self, size: int) -> None:
        """Skip ``size`` bytes."""
        self.require(size)
        self.file.seek(size, os.SEEK_CUR)
        self.remaining -= size

    def require(self, size: int) -> None:
        """Raise ValueError if fewer than ``size`` bytes remain."""
        if size > self.remaining:
            end = "it is truncated" if self.size <= LARGEST_HEADER else f"its header has over {LARGEST_HEADER:,} bytes"
            raise ValueError(f"{end}: {size:,} more bytes are expected, {self.remaining:,} remain")

    def number(self, kind: str) -> int:
        """Read an unsigned integer of a numpy type."""
        return int.from_bytes(self.take(int(kind[2:])), "little")

    def count(self, items: str, most: int) -> int:
        """Read a count, which cannot exceed the remaining bytes."""
        number = self.number("<u8")
        if number > min(most, self.remaining):
            raise ValueError(f"it claims to have {number:,} {items}")
        return number

    def text(self, most: int) -> str:
        """Read a text of at most ``most`` bytes."""
        size = self.number("<u8")
        if size > most:
            raise ValueError(f"a text of {size:,} bytes exceeds the limit of {most:,}")
        self.remaining_text -= size
        if self.remaining_text < 0:
            raise ValueError(f"names and texts of over {MOST_TEXT:,} bytes")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise ValueError("a text that is not UTF-8") from None

    def value(self, kind: int, name: str) -> Any:
        """Read the value of key ``name``; skip arrays."""
        if kind == TEXT:
            return self.text(LONGEST_TEXT)
        if kind == ARRAY:
            kind = self.number("<u4")
            count = self.count(f"entries in {shortened(name)}", MOST_ENTRIES)
            start = self.file.tell()
            if kind == TEXT:
                self.skip_texts(count)
            else:
                self.skip(count * self.item_size(kind, name))
            return StoredArray(self.path, kind, count, start, self.file.tell() - start)
        values = np.frombuffer(self.take(self.item_size(kind, name)), NUMBERS[kind]).tolist()
        return bool(values[0]) if kind == BOOL else values[0]

    def skip_texts(self, count: int) -> None:
        """Skip ``count`` texts, reading blocks of the file instead of single lengths."""
        self.remaining_entries -= count
        if self.remaining_entries < 0:
            raise ValueError(f"over {MOST_ENTRIES:,} texts in arrays")
        start = position = block_start = self.file.tell()
        block = b""
        for _ in range(count):
            place = position - block_start
            if place + LENGTH.size > len(block):
                self.require(position + LENGTH.size - start)
                self.file.seek(position)
                block_start, place, block = position, 0, self.file.read(BLOCK)
                if len(block) < LENGTH.size:
                    raise ValueError("it is truncated")
            (size,) = LENGTH.unpack_from(block, place)
            if size > LONGEST_TEXT:
                raise ValueError(f"a text of {size:,} bytes exceeds the limit of {LONGEST_TEXT:,}")
            position += LENGTH.size + size
        self.file.seek(start)
        self.skip(position - start)

    def item_size(self, kind: int, name: str) -> int:
        """Return the bytes of a number of type ``kind``."""
        if kind not in NUMBERS:
            raise ValueError(f"{shortened(name)} has values of the unknown type {kind}")
        return np.dtype(NUMBERS[kind]).itemsize

    def tensor_description(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read name, shape, type and offset of a tensor. Offsets count from the end of the header."""
        name = self.text(LONGEST_NAME)
        dimensions = self.number("<u4")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"tensor {shortened(name)} has {dimensions:,} dimensions")
        shape = tuple(self.number("<u8") for _ in range(dimensions))[::-1]
        return name, shape, self.number("<u4"), self.number("<u8")

    def place_tensors(
        self, descriptions: list[tuple[str, tuple[int, ...], int, int]], alignment: Any
    ) -> dict[str, StoredBlocks]:
        """Return the tensors with their places in the file, checked against its size."""
        if type(alignment) is not int or not 1 <= alignment <= LARGEST_ALIGNMENT:
            raise ValueError(f"general.alignment is {shortened(alignment)}")
        start = -(-self.file.tell() // alignment) * alignment
        tensors: dict[str, StoredBlocks] = {}
        for name, shape, kind, offset in descriptions:
            label = f"tensor {shortened(name)}"
            if name in tensors:
                raise ValueError(f"{label} is in it twice")
            if kind not in TYPES:
                supported = ", ".join(item[0] for item in TYPES.values())
                raise UserError(f"{self.path}: {label}: type {kind} is unsupported; supported are {supported}")
            type_name, values, block_size = TYPES[kind]
            if shape and shape[-1] % values:
                raise ValueError(f"{label} has rows of {shape[-1]:,} values, {type_name} blocks of {values}")
            size = math.prod(shape) // values * block_size
            end = start + offset + size
            if end > self.size:
                raise ValueError(f"{label} would end at byte {end:,} of {self.size:,}: the file is incomplete")
            tensors[name] = StoredBlocks(self.path, type_name, shape, start + offset, size)
        return tensors
