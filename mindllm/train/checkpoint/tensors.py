"""Reads and writes safetensors files with bounded memory: one tensor at a time out, views of a memory map in.

The format is that of https://github.com/huggingface/safetensors: the header's length (uint64, little endian), a JSON header
``{name: {dtype, shape, data_offsets}}``, the bytes of all tensors without gaps. The library's own writer wants every tensor in
memory at once and does not hash; its reader copies.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()}
ALIGNMENT = 8
CHUNK = 4 << 20


class TensorSource(Protocol):
    """What can be saved: an array, or an object that knows its shape and dtype and becomes an array when its turn comes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __array__(self) -> np.ndarray: ...


class HashingWriter:
    """Writes to a file and knows size and SHA-256 of what it wrote."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all bytes so far."""
        return self._hash.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Writes all of ``data``, a piece at a time: each is hashed while it is in the processor's cache."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            self._hash.update(piece)
            self.file.write(piece)
            self.size += len(piece)


def payload_bytes(tensors: Mapping[str, TensorSource]) -> int:
    """Returns the bytes that the values of ``tensors`` take, without any header."""
    return sum(_bytes(tensor) for tensor in tensors.values())


def write_tensors(writer: HashingWriter, tensors: Mapping[str, TensorSource]) -> None:
    """Writes ``tensors`` as one safetensors file, holding at most one of them as a contiguous copy.

    Raises:
        TypeError, ValueError: a dtype or a name that the format does not have; names the tensor. Nothing is written then.
    """
    # Wide elements first keeps every tensor aligned to its element without gaps, which the format forbids.
    names = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    writer.write(_header({name: tensors[name] for name in names}))
    for name in names:
        _write_tensor(writer, name, tensors[name])


def _write_tensor(writer: HashingWriter, name: str, source: TensorSource) -> None:
    array = np.ascontiguousarray(np.asarray(source), dtype=np.dtype(source.dtype).newbyteorder("<"))
    if array.nbytes != _bytes(source):
        raise ValueError(f"tensor {name} announced {_bytes(source)} bytes and gave {array.nbytes}")
    writer.write(array.reshape(-1).view(np.uint8).data)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file as views of a private memory map: pages are read when they are touched.

    The arrays can be written to, the file does not change. They keep the file's blocks on the disk until the last is dropped.

    Raises:
        ValueError: the file is no safetensors file.
    """
    with open(path, "rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(buffer[:8], "little")
    header = json.loads(buffer[8:start])
    header.pop("__metadata__", None)
    return {name: _view(buffer, start, entry) for name, entry in header.items()}


def _view(buffer: mmap.mmap, start: int, entry: dict[str, Any]) -> np.ndarray:
    return np.ndarray(tuple(entry["shape"]), DTYPES[entry["dtype"]], buffer, start + entry["data_offsets"][0])


def _header(tensors: Mapping[str, TensorSource]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "np"}}
    offset = 0
    for name, tensor in tensors.items():
        if name in entries:
            raise ValueError(f"a tensor cannot have the name {name}: the format reserves it")
        code = CODES.get(np.dtype(tensor.dtype).name)
        if code is None:
            raise TypeError(
                f"tensor {name}: a checkpoint cannot hold dtype {tensor.dtype}; it can hold {', '.join(CODES)}"
            )
        end = offset + _bytes(tensor)
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: TensorSource) -> int:
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def file_sha256(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
