"""Safetensors files with bounded memory: tensors are written one at a time and read as views of a memory map.

The format is that of https://github.com/huggingface/safetensors: the header's length (uint64, little endian), a JSON header
``{name: {dtype, shape, data_offsets}}``, the bytes of all tensors without gaps. The library's writer needs all tensors in memory
and computes no hash; its reader copies.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
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
LARGEST_HEADER = 100 << 20  # the library's own limit
ALIGNMENT = 8
CHUNK = 4 << 20
Slices = tuple[slice, ...]


class TensorSource(Protocol):
    """A tensor to save or load: an array, or an object with shape and dtype that becomes an array on request."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __array__(self) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, read each time it becomes an array."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    creates_array: ClassVar[bool] = True  # each array has a single owner

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        content = np.fromfile(self.path, np.uint8, byte_size(self), offset=self.offset)
        return content.view(self.dtype).reshape(self.shape).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """Read the values at ``slices`` only."""
        if byte_size(self) == 0:
            return np.asarray(self)[slices]
        content = np.memmap(self.path, np.uint8, "r", self.offset, (byte_size(self),))
        return np.array(content.view(self.dtype).reshape(self.shape)[slices])


def read_slices(source: Any, slices: Slices) -> np.ndarray:
    """Return the values of a tensor at ``slices``, reading no others if the source can."""
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


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed each time it becomes an array.

    Attributes:
        make: compute all values.
        make_slices: compute the values at some slices only. Without it they are cut from all values.
        path: the file that the tensor comes from, for error messages.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    make_slices: Callable[[Slices], np.ndarray] | None = None
    path: Path | None = None

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.make(), dtype)

    def read(self, slices: Slices) -> np.ndarray:
        """Compute the values at ``slices``."""
        return self.make_slices(slices) if self.make_slices else self.make()[slices]


class HashingWriter:
    """A file writer that counts and hashes its output."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The hexadecimal SHA-256 of all bytes so far."""
        return self._hash.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Write ``data`` in pieces, so that each is hashed while it is in the processor's cache."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            self._hash.update(piece)
            self.file.write(piece)
            self.size += len(piece)


def payload_bytes(tensors: Mapping[str, TensorSource]) -> int:
    """Return the bytes of all values, without a header."""
    return sum(byte_size(tensor) for tensor in tensors.values())


def write_tensors(
    writer: HashingWriter,
    tensors: Mapping[str, TensorSource],
    framework: str = "np",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``tensors`` as one safetensors file with at most one of them in memory as a contiguous copy.

    Arguments:
        framework: the ``format`` in the header.
        metadata: additional texts of the header.

    Raises:
        TypeError, ValueError: the format does not support a dtype or a name; names the tensor. Nothing is written.
    """
    # Wide elements first keeps every tensor aligned to its element without gaps, which the format forbids.
    names = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    writer.write(_header({name: tensors[name] for name in names}, {"format": framework, **(metadata or {})}))
    for name in names:
        source = tensors[name]
        array = np.ascontiguousarray(np.asarray(source), dtype=np.dtype(source.dtype).newbyteorder("<"))
        if array.nbytes != byte_size(source):
            raise ValueError(f"tensor {name} has {array.nbytes} bytes instead of {byte_size(source)}")
        writer.write(array.reshape(-1).view(np.uint8).data)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file as views of a private memory map, whose pages are read on access.

    The arrays are writable without changing the file. They keep the file's blocks on the disk until the last is dropped.

    Raises:
        ValueError: the file is not a safetensors file.
    """
    tensors = stored_tensors(path)
    with open_file(path) as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: np.ndarray(item.shape, item.dtype, buffer, item.offset) for name, item in tensors.items()}


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, reading its header only. Raises ValueError like :func:`read_tensors`."""
    header, start = _read_header(path)
    header.pop(METADATA, None)
    size = path.stat().st_size
    return {name: _stored(path, start, size, name, entry) for name, entry in header.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts in the header of a safetensors file. Raises ValueError like :func:`read_tensors`."""
    return dict(_read_header(path)[0].get(METADATA) or {})


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the offset of the first tensor."""
    size = path.stat().st_size
    with open_file(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > min(size, LARGEST_HEADER):
            raise ValueError(f"its header would end at byte {start} of {size}")
        header = parse_json(file.read(start - 8))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, start


def _stored(path: Path, start: int, size: int, name: str, entry: Any) -> StoredTensor:
    try:
        shape, dtype = tuple(map(int, entry["shape"])), DTYPES[entry["dtype"]]
        first, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"tensor {name} has the invalid description {entry} ({error})") from None
    tensor = StoredTensor(path, start + first, shape, dtype)
    if min(shape, default=0) < 0 or first < 0 or first + byte_size(tensor) != end or start + end > size:
        raise ValueError(f"tensor {name} has bytes {start + first} to {start + end}, the file ends at {size}")
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
                f"tensor {name}: a checkpoint cannot store dtype {tensor.dtype}; supported are {', '.join(CODES)}"
            )
        end = offset + byte_size(tensor)
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def byte_size(tensor: TensorSource) -> int:
    """Return the bytes of a tensor's values."""
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
