"""MindSpore's ``.ckpt`` files: protobuf messages of any size, read in place.

MindSpore itself reads the whole file, of at most 2 GB. Its ``checkpoint.proto`` defines a ``Checkpoint`` as repeated
``Value{tag, TensorProto}`` and a ``TensorProto`` as ``{dims, tensor_type, tensor_content}``. A tensor over 512 MB is several
consecutive values with one tag. The encoding is described at https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import ml_dtypes
import numpy as np

from mindllm.outside import open_file

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
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
TEXT = "str"  # entries that are not tensors, such as the name of a learning-rate schedule
CHECKSUM, CHECKSUM_BYTES = b"crc_num", 17  # the word and ten bytes, appended by save_checkpoint(crc_check=True)
VALUE = TAG = DIMS = 1
TENSOR = TYPE = 2
CONTENT = 3
LONGEST_NAME = 4096
MOST_AXES = 16
NOT_A_CHECKPOINT = "it is not a checkpoint of MindSpore, or it is encrypted"
Place = tuple[int, int]  # start and end of some bytes


def read_fields(file: IO[bytes], start: int, end: int) -> Iterator[tuple[int, int | Place]]:
    """Yield the fields of a message: their numbers, each with an integer or the place of its bytes, which are skipped."""
    position = start
    while position < end:
        key, position = _read_varint(file, position, end)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, position = _read_varint(file, position, end)
            yield number, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(wire)
        if wire == BYTES:
            size, position = _read_varint(file, position, end)
        if size is None or position + size > end:
            raise ValueError(f"it ends or breaks off at byte {position}")
        yield number, (position, position + size)
        position += size


def _read_varint(file: IO[bytes], position: int, end: int) -> tuple[int, int]:
    """Return an integer of one to ten bytes with seven bits each, and the position after it."""
    file.seek(position)
    content = file.read(min(10, end - position))
    value = 0
    for index, byte in enumerate(content):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError(f"it ends or breaks off at byte {position}")


def read_integers(file: IO[bytes], field: int | Place) -> list[int]:
    """Return the signed integers of a field: a single one or a packed list."""
    values = [field] if isinstance(field, int) else []
    if isinstance(field, tuple):
        position = field[0]
        while position < field[1]:
            value, position = _read_varint(file, position, field[1])
            values.append(value)
    return [value - 2**64 if value >= 2**63 else value for value in values]


class Message:
    """A small protobuf message in memory. Raises ValueError for a field that is missing or of another kind."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._file = io.BytesIO(content)
        self._fields = list(read_fields(self._file, 0, len(content)))

    def messages(self, number: int) -> list[Message]:
        """Return the messages of a field, an empty list if it is absent."""
        return [Message(content) for content in self._contents(number)]

    def message(self, number: int) -> Message:
        """Return the first message of a field."""
        return next(iter(self.messages(number)), None) or self._raise_missing(number)

    def text(self, number: int) -> str:
        """Return the text of a field."""
        contents = self._contents(number) or self._raise_missing(number)
        return contents[0].decode("utf-8")

    def integers(self, number: int) -> list[int]:
        """Return the integers of a field, packed or repeated."""
        return [value for key, field in self._fields if key == number for value in read_integers(self._file, field)]

    def integer(self, number: int) -> int:
        """Return the last integer of a field, 0 if it is absent."""
        return next(iter(self.integers(number)[::-1]), 0)

    def _raise_missing(self, number: int) -> NoReturn:
        raise ValueError(f"field {number} is missing")

    def _contents(self, number: int) -> list[bytes]:
        places = [field for key, field in self._fields if key == number and isinstance(field, tuple)]
        return [self._content[start:end] for start, end in places]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a ``.ckpt``, read from its places in the file each time it becomes an array."""

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
            raise ValueError(f"{self.path} was truncated while it was read")
        return content.view(self.dtype).reshape(self.shape).astype(dtype or self.dtype, copy=False)


def checkpoint_tensors(path: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of a ``.ckpt`` by name without reading their values.

    Raises:
        ValueError: the file is damaged or incomplete; names the tensor.
    """
    tensors: dict[str, CheckpointTensor] = {}
    last = ""
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(max(size - CHECKSUM_BYTES, 0))
        end = size - CHECKSUM_BYTES if file.read(len(CHECKSUM)) == CHECKSUM else size
        for number, place in read_fields(file, 0, end):
            if number != VALUE or not isinstance(place, tuple):
                raise ValueError(NOT_A_CHECKPOINT)
            name, kind, shape, content = _read_value(file, place)
            if kind == TEXT:
                continue
            if name in tensors and name != last:
                raise ValueError(f"tensor {name} is in it twice")
            # A large tensor continues in the values that follow.
            earlier = tensors.get(name)
            tensor = _checked_tensor(path, name, kind, shape, (*(earlier.places if earlier else ()), content))
            if earlier is not None and (earlier.shape, earlier.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"the pieces of tensor {name} have different shapes or types")
            tensors[name] = tensor
            last = name
    if not tensors:
        raise ValueError("it has no tensors")
    for name, tensor in tensors.items():
        count = sum(end - start for start, end in tensor.places)
        needed = math.prod(tensor.shape) * tensor.dtype.itemsize
        if count != needed:
            raise ValueError(f"tensor {name} of shape {list(tensor.shape)} needs {needed} bytes and has {count}")
    return tensors


def _checked_tensor(
    path: Path, name: str, kind: str, dims: tuple[int, ...], places: tuple[Place, ...]
) -> CheckpointTensor:
    if kind not in DTYPES:
        raise ValueError(f"tensor {name} has the unknown type {kind}")
    shape = () if dims == (0,) else dims  # a scalar is written with one axis of size 0
    if min(shape, default=0) < 0 or len(shape) > MOST_AXES:
        raise ValueError(f"tensor {name} has the shape {list(shape[:MOST_AXES])}")
    return CheckpointTensor(path, places, shape, DTYPES[kind])


def _read_value(file: IO[bytes], place: Place) -> tuple[str, str, tuple[int, ...], Place]:
    """Return name, type, dimensions and the place of the content of one value."""
    fields = dict(read_fields(file, *place))
    name = _read_text(file, fields.get(TAG))
    tensor = fields.get(TENSOR)
    if not isinstance(tensor, tuple):
        raise ValueError(f"{name} is not a tensor (a table of parameters, perhaps)")
    dims: list[int] = []
    kind, content = "", None
    for number, field in read_fields(file, *tensor):
        if number == DIMS:
            dims += read_integers(file, field)
        elif number == TYPE:
            kind = _read_text(file, field)
        elif number == CONTENT and isinstance(field, tuple):
            content = field
    if content is None:
        raise ValueError(f"tensor {name} has no content")
    return name, kind, tuple(dims), content


def _read_text(file: IO[bytes], field: int | Place | None) -> str:
    if not isinstance(field, tuple) or field[1] - field[0] > LONGEST_NAME:
        raise ValueError(NOT_A_CHECKPOINT)
    file.seek(field[0])
    return file.read(field[1] - field[0]).decode("utf-8")
