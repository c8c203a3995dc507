"""MindSpore's ``.ckpt``: a protobuf message of any size, parsed here, because the library reads it whole and 2 GB at most.

As ``checkpoint.proto`` of MindSpore says, a ``Checkpoint`` is repeated ``Value{tag, TensorProto}``, a ``TensorProto`` is
``{dims, tensor_type, tensor_content}``. A tensor over 512 MB is several values of the same tag one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np

from mindllm.outside import open_file
from mindllm.weight_files.wire import Place, fields_of, numbers_of

DTYPES: dict[str, np.dtype] = {
    "Float64": np.dtype("<f8"),
    "Float32": np.dtype("<f4"),
    "Float16": np.dtype("<f2"),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
    "Int64": np.dtype("<i8"),
    "Int32": np.dtype("<i4"),
    "Int16": np.dtype("<i2"),
    "Int8": np.dtype("i1"),
    "UInt64": np.dtype("<u8"),
    "UInt32": np.dtype("<u4"),
    "UInt16": np.dtype("<u2"),
    "UInt8": np.dtype("u1"),
    "Bool": np.dtype("?"),
}
TEXT = "str"  # entries such as the name of a learning-rate schedule: no tensors
CHECKSUM, CHECKSUM_BYTES = b"crc_num", 17  # what save_checkpoint(crc_check=True) appends: the word and ten bytes
VALUE = TAG = DIMS = 1
TENSOR = TYPE = 2
CONTENT = 3
LONGEST_NAME = 4096
MOST_AXES = 16


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a ``.ckpt``: read from its places when it is asked for its array, every time, and not kept."""

    path: Path
    places: tuple[Place, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        content = np.empty(sum(end - start for start, end in self.places), np.uint8)
        filled = 0
        with open_file(self.path) as file:
            for start, end in self.places:
                file.seek(start)
                filled += file.readinto(content[filled : filled + end - start].data)
        if filled != len(content):
            raise ValueError(f"{self.path} ended while it was read")
        return content.view(self.dtype).reshape(self.shape).astype(dtype or self.dtype, copy=False)


@dataclass(frozen=True)
class _Value:
    tag: str
    dims: tuple[int, ...]
    type: str
    place: Place


def checkpoint_tensors(path: Path) -> dict[str, CheckpointTensor]:
    """The tensors of a ``.ckpt`` by their names, without reading their values.

    Raises:
        ValueError: not such a file, or a part of one; names the tensor.
    """
    tensors: dict[str, CheckpointTensor] = {}
    last = ""
    with open_file(path) as file:
        for value in _values(file):
            if value.type == TEXT:
                continue
            if value.tag in tensors and value.tag != last:
                raise ValueError(f"tensor {value.tag} is in it twice")
            tensors[value.tag] = _tensor(path, value, tensors.get(value.tag))
            last = value.tag
    if not tensors:
        raise ValueError("it holds no tensor")
    for name, tensor in tensors.items():
        held = sum(end - start for start, end in tensor.places)
        needed = math.prod(tensor.shape) * tensor.dtype.itemsize
        if held != needed:
            raise ValueError(f"tensor {name} of shape {list(tensor.shape)} needs {needed} bytes and has {held}")
    return tensors


def _tensor(path: Path, value: _Value, before: CheckpointTensor | None) -> CheckpointTensor:
    """The tensor with one more piece of it."""
    if value.type not in DTYPES:
        raise ValueError(f"tensor {value.tag} has the type {value.type}, which is not understood")
    shape, dtype = () if value.dims == (0,) else value.dims, DTYPES[value.type]
    if min(shape, default=0) < 0 or len(shape) > MOST_AXES:
        raise ValueError(f"tensor {value.tag} has the shape {list(shape[:MOST_AXES])}")
    if before is not None and (before.shape, before.dtype) != (shape, dtype):
        raise ValueError(f"the pieces of tensor {value.tag} have different shapes or types")
    return CheckpointTensor(path, (*(before.places if before else ()), value.place), shape, dtype)


def _values(file: IO[bytes]) -> Iterator[_Value]:
    for number, place in fields_of(file, 0, _end(file)):
        if number != VALUE or not isinstance(place, tuple):
            raise ValueError("it is no checkpoint of MindSpore, or an encrypted one")
        yield _value(file, place)


def _end(file: IO[bytes]) -> int:
    size = file.seek(0, 2)
    file.seek(max(size - CHECKSUM_BYTES, 0))
    return size - CHECKSUM_BYTES if file.read(len(CHECKSUM)) == CHECKSUM else size


def _value(file: IO[bytes], place: Place) -> _Value:
    fields = dict(fields_of(file, *place))
    tag = _text(file, fields.get(TAG))
    tensor = fields.get(TENSOR)
    if not isinstance(tensor, tuple):
        raise ValueError(f"{tag} is no tensor (a table of parameters, perhaps)")
    dims: list[int] = []
    kind, content = "", None
    for number, found in fields_of(file, *tensor):
        if number == DIMS:
            dims += numbers_of(file, found)
        elif number == TYPE:
            kind = _text(file, found)
        elif number == CONTENT and isinstance(found, tuple):
            content = found
    if content is None:
        raise ValueError(f"tensor {tag} has no content")
    return _Value(tag, tuple(dims), kind, content)


def _text(file: IO[bytes], found: int | Place | None) -> str:
    if not isinstance(found, tuple) or found[1] - found[0] > LONGEST_NAME:
        raise ValueError("it is no checkpoint of MindSpore, or an encrypted one")
    file.seek(found[0])
    return file.read(found[1] - found[0]).decode("utf-8")
