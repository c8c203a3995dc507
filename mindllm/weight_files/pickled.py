"""``pytorch_model.bin``: a zip archive of a pickle and the raw values of its tensors (torch.save since PyTorch 1.6).

The pickle is read by :mod:`unpickling`, which runs nothing; the values are read from their place in the file when needed.
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mindllm.errors import UserError
from mindllm.outside import open_file
from mindllm.weight_files.unpickling import Name, RefusedPickleError, kind_of, unpickle

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number that files before PyTorch 1.6 begin with
LARGEST_PICKLE = 100 << 20
MOST_AXES = 16
LOCAL_HEADER = 30  # bytes before the name in front of every part of a zip archive
DTYPES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}


@dataclass(frozen=True)
class Storage:
    """Values of tensors in the file: where they begin and how many they are."""

    offset: int
    dtype: np.dtype
    count: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of the archive: read when it is asked for its array, every time, and not kept. ``strides`` count values."""

    path: Path
    storage: Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        span = _span(self.shape, self.strides)
        offset = self.storage.offset + self.start * self.dtype.itemsize
        if not span:
            return np.empty(self.shape, dtype or self.dtype)
        if self.strides == _contiguous(self.shape):
            values = np.fromfile(self.path, self.dtype, span, offset=offset).reshape(self.shape)
        else:
            mapped = np.memmap(self.path, self.dtype, "r", offset, (span,))
            steps = [step * self.dtype.itemsize for step in self.strides]
            values = np.array(np.lib.stride_tricks.as_strided(mapped, self.shape, steps, writeable=False))
        return values.astype(dtype or self.dtype, copy=False)


def pickled_tensors(path: Path) -> dict[str, PickledTensor]:
    """The tensors of a file that ``torch.save(model.state_dict(), path)`` wrote, without reading their values.

    Raises:
        ValueError: not such a file, a part of one, or one that holds anything but tensors by name.
    """
    with open_file(path) as file:
        begin = file.read(len(LEGACY))
    if begin == LEGACY:
        raise UserError(
            f"{path}: is in the format of PyTorch before 1.6; write it anew, where you trust the file: "
            "torch.save(torch.load(path, weights_only=True), path)"
        )
    try:
        with open_file(path) as opened, zipfile.ZipFile(opened) as archive:
            return _tensors_of(path, archive)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"{error}") from None


def _tensors_of(path: Path, archive: zipfile.ZipFile) -> dict[str, PickledTensor]:
    parts = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in parts if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError("it is an archive without a data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    _refuse_compressed(parts[pickles[0]])
    if parts[pickles[0]].file_size > LARGEST_PICKLE:
        raise ValueError(f"its data.pkl has {parts[pickles[0]].file_size} bytes")
    order = parts.get(f"{folder}byteorder")
    if order is not None and (order.file_size > 16 or archive.read(order).strip() != b"little"):
        raise ValueError("its numbers are not little endian")
    reader = _Reader(path, folder, parts)
    found = unpickle(archive.read(pickles[0]), reader.constructions, _STORAGES, reader.storage)
    return _by_name(found)


class _Reader:
    """Makes tensors of what the pickle says, checked against the parts of the archive."""

    def __init__(self, path: Path, folder: str, parts: dict[str, zipfile.ZipInfo]) -> None:
        self._path = path
        self._folder = folder
        self._parts = parts
        self._size = path.stat().st_size
        self.constructions = {
            "collections.OrderedDict": _empty,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_parameter": _data_of_parameter,
            "torch.Size": _size_of,
            "torch.device": lambda arguments: None,
        }

    def storage(self, arguments: tuple[Any, ...]) -> Storage:
        """Of a reference ("storage", type, number of the part, device, count)."""
        match arguments[0]:
            case ("storage", Name() as kind, str() as key, str(), int() as count) if kind.name in DTYPES and count >= 0:
                return Storage(
                    self._place(f"{self._folder}data/{key}", DTYPES[kind.name], count), DTYPES[kind.name], count
                )
        raise RefusedPickleError("it refers to a part outside of it that is no storage of a tensor")

    def _place(self, name: str, dtype: np.dtype, count: int) -> int:
        """Where in the file the values of a part begin."""
        if name not in self._parts:
            raise ValueError(f"its part {name} is missing")
        part = self._parts[name]
        _refuse_compressed(part)
        with open_file(self._path) as file:
            file.seek(part.header_offset)
            header = file.read(LOCAL_HEADER)
        if len(header) < LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise ValueError(f"its part {name} has no header")
        start = (
            part.header_offset + LOCAL_HEADER + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        )
        needed = count * dtype.itemsize
        if part.file_size < needed or start + part.file_size > self._size:
            raise ValueError(
                f"its part {name} has {part.file_size} bytes and {needed} are needed, the file ends at {self._size}"
            )
        return start

    def tensor(self, arguments: tuple[Any, ...]) -> PickledTensor:
        """Of (storage, start, shape, strides, requires_grad, hooks[, metadata])."""
        match arguments[:4]:
            case (Storage() as storage, int() as start, tuple() as shape, tuple() as strides) if _are_sizes(
                (start, *shape, *strides)
            ):
                span = _span(shape, strides)
                if len(shape) != len(strides) or start + span > storage.count or math.prod(shape) > max(span, 1):
                    raise ValueError(f"it has a tensor of shape {list(shape)} in {storage.count} values")
                return PickledTensor(self._path, storage, start, shape, strides)
        raise RefusedPickleError("it has a tensor without storage, shape and strides")


def _by_name(found: Any) -> dict[str, PickledTensor]:
    if not isinstance(found, dict):
        raise RefusedPickleError(f"it holds {kind_of(found)}, no dictionary of tensors by name")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, PickledTensor):
            raise RefusedPickleError(
                f"it holds {kind_of(value)} under {name[:80] if isinstance(name, str) else kind_of(name)!r}, no tensor; save the "
                "state_dict of the model alone"
            )
    return found


def _refuse_compressed(part: zipfile.ZipInfo) -> None:
    if part.compress_type != zipfile.ZIP_STORED or part.flag_bits & 1:
        raise ValueError(f"its part {part.filename} is compressed or encrypted, which torch.save never does")


def _empty(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise RefusedPickleError("it makes an OrderedDict of something")
    return {}


def _data_of_parameter(arguments: tuple[Any, ...]) -> PickledTensor:
    if not arguments or not isinstance(arguments[0], PickledTensor):
        raise RefusedPickleError("it has a parameter without a tensor")
    return arguments[0]


def _size_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return arguments[0] if arguments and isinstance(arguments[0], tuple) else ()


def _are_sizes(values: tuple[Any, ...]) -> bool:
    """Whole numbers of bounded size and count, so that computing with them is cheap."""
    return len(values) <= 2 * MOST_AXES + 1 and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many values lie from the first of the tensor to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=False))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


_STORAGES = frozenset(f"torch.{name}" for name in DTYPES)
