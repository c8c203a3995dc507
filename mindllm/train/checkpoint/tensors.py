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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import ml_dtypes
import numpy as np

from mindllm.errors import UserError
from mindllm.outside import open_file, parse_json

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
}
NOT_IN_NUMPY = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
DTYPES = {code: NOT_IN_NUMPY.get(name) or np.dtype(name).newbyteorder("<") for name, code in CODES.items()}
METADATA = "__metadata__"
LARGEST_HEADER = 100 << 20  # what the library accepts
ALIGNMENT = 8
CHUNK = 4 << 20
Slices = tuple[slice, ...]


class TensorSource(Protocol):
    """What can be saved: an array, or an object that knows its shape and dtype and becomes an array when its turn comes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __array__(self) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file: read when it is asked for its array, every time, and not kept."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    reads_anew: ClassVar[bool] = True  # nobody else has the array

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        content = np.fromfile(self.path, np.uint8, _bytes(self), offset=self.offset)
        return content.view(self.dtype).reshape(self.shape).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """The values at ``slices``; of the file, the pages that hold them."""
        if _bytes(self) == 0:
            return np.asarray(self)[slices]
        content = np.memmap(self.path, np.uint8, "r", self.offset, (_bytes(self),))
        return np.array(content.view(self.dtype).reshape(self.shape)[slices])


def read_slices(source: Any, slices: Slices) -> np.ndarray:
    """The values of a tensor at ``slices``, whichever way it is held; no more of it is read than must be."""
    return source.read(slices) if hasattr(source, "read") else np.asarray(source)[slices]


def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype ``float32``, ``float16`` or ``bfloat16`` of a configuration."""
    return NOT_IN_NUMPY.get(name) or np.dtype(name)


@dataclass(frozen=True)
class Converted:
    """A tensor rounded to ``dtype`` (to the nearest, ties to even) each time it becomes an array.

    Raises UserError then, naming the tensor, when a finite value would become infinite.
    """

    name: str
    source: TensorSource
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self._rounded(np.asarray(self.source)).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """Read and convert the values at ``slices`` only."""
        return self._rounded(read_slices(self.source, slices))

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            rounded = values.astype(self.dtype, copy=False)
        if rounded is not values and not np.isfinite(rounded).all() and np.isfinite(values).all():
            raise UserError(f"weight {self.name} has values too large for {self.dtype.name}: choose another dtype")
        return rounded


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


def write_tensors(
    writer: HashingWriter,
    tensors: Mapping[str, TensorSource],
    framework: str = "np",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes ``tensors`` as one safetensors file, holding at most one of them as a contiguous copy.

    ``framework`` is what the header names as the file's ``format``; ``metadata`` are further texts of the header.

    Raises:
        TypeError, ValueError: a dtype or a name that the format does not have; names the tensor. Nothing is written then.
    """
    # Wide elements first keeps every tensor aligned to its element without gaps, which the format forbids.
    names = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    writer.write(_header({name: tensors[name] for name in names}, {"format": framework, **(metadata or {})}))
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
    tensors = stored_tensors(path)
    with open_file(path) as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: np.ndarray(item.shape, item.dtype, buffer, item.offset) for name, item in tensors.items()}


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file without reading more than its header; errors as :func:`read_tensors`."""
    header, start = _read_header(path)
    header.pop(METADATA, None)
    size = path.stat().st_size
    return {name: _stored(path, start, size, name, entry) for name, entry in header.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the texts in the header of a safetensors file; errors as :func:`read_tensors`."""
    return dict(_read_header(path)[0].get(METADATA) or {})


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the first tensor begins."""
    size = path.stat().st_size
    with open_file(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > min(size, LARGEST_HEADER):
            raise ValueError(f"its header would end at byte {start} of {size}")
        header = parse_json(file.read(start - 8))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, start


def _stored(path: Path, start: int, size: int, name: str, entry: Any) -> StoredTensor:
    try:
        shape, dtype = tuple(map(int, entry["shape"])), DTYPES[entry["dtype"]]
        first, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"tensor {name} is described by {entry}, which is not understood ({error})") from None
    tensor = StoredTensor(path, start + first, shape, dtype)
    if min(shape, default=0) < 0 or first < 0 or first + _bytes(tensor) != end or start + end > size:
        raise ValueError(f"tensor {name} of bytes {start + first} to {start + end} is not in it, it has {size}")
    return tensor


def _header(tensors: Mapping[str, TensorSource], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {METADATA: dict(metadata)}
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
    with open_file(path) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
