"""Pickled PyTorch weights (``pytorch_model.bin``): a zip archive of one pickle and the raw values of its tensors.

Python's unpickler imports and calls whatever the file names, and even a restricted one lets a small file exhaust memory.
:func:`unpickle` interprets the few instructions that a dictionary of tensors needs. A global is a name from a fixed table, a call
is one of five constructions of plain values, and every other instruction is an error. Values are read from the file when needed.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mindllm.errors import UserError
from mindllm.outside import open_file

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # magic number of files before PyTorch 1.6
LARGEST_PICKLE = 100 << 20
MOST_STEPS = 10_000_000  # a model of 100,000 tensors takes three million
MOST_AXES = 16
LOCAL_HEADER = 30  # bytes of the fixed header of a zip member
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
STORAGE_NAMES = frozenset(f"torch.{name}" for name in DTYPES)
MARK = object()
Construction = Callable[[tuple[Any, ...]], Any]


class RefusedPickleError(ValueError):
    """A pickle that contains anything except tensors by name."""


@dataclass(frozen=True)
class GlobalName:
    """A global of the pickle, such as ``torch.FloatStorage``. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Storage:
    """Consecutive values in the file: their offset, type and count."""

    offset: int
    dtype: np.dtype
    count: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of the archive, read from the file each time it becomes an array. ``strides`` count values."""

    path: Path
    storage: Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        span = value_span(self.shape, self.strides)
        offset = self.storage.offset + self.start * self.dtype.itemsize
        if not span:
            return np.empty(self.shape, dtype or self.dtype)
        contiguous = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        if self.strides == contiguous:
            values = np.fromfile(self.path, self.dtype, span, offset=offset).reshape(self.shape)
        else:
            mapped = np.memmap(self.path, self.dtype, "r", offset, (span,))
            steps = [step * self.dtype.itemsize for step in self.strides]
            values = np.array(np.lib.stride_tricks.as_strided(mapped, self.shape, steps, writeable=False))
        return values.astype(dtype or self.dtype, copy=False)


def pickled_tensors(path: Path) -> dict[str, PickledTensor]:
    """Return the tensors of a file written by ``torch.save(model.state_dict(), path)`` without reading their values.

    Raises:
        ValueError: the file is damaged, incomplete, or contains anything except tensors by name.
    """
    with open_file(path) as file:
        begin = file.read(len(LEGACY))
    if begin == LEGACY:
        raise UserError(
            f"{path}: has the format of PyTorch before 1.6; convert it, if you trust the file: "
            "torch.save(torch.load(path, weights_only=True), path)"
        )
    try:
        with open_file(path) as opened, zipfile.ZipFile(opened) as archive:
            tensors = _unpickle_archive(path, archive)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"{error}") from None
    if not isinstance(tensors, dict):
        raise RefusedPickleError(f"it contains {describe_value(tensors)} instead of a dictionary of tensors by name")
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, PickledTensor):
            key = name[:80] if isinstance(name, str) else describe_value(name)
            raise RefusedPickleError(
                f"it contains {describe_value(value)} under {key!r} instead of a tensor; save only the state_dict of the model"
            )
    return tensors


def _unpickle_archive(path: Path, archive: zipfile.ZipFile) -> Any:
    """Return the value of the archive's only pickle, with a tensor for each reference to one."""
    members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError("it is an archive without a data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    _require_stored(members[pickles[0]])
    if members[pickles[0]].file_size > LARGEST_PICKLE:
        raise ValueError(f"its data.pkl has {members[pickles[0]].file_size} bytes")
    order = members.get(f"{folder}byteorder")
    if order is not None and (order.file_size > 16 or archive.read(order).strip() != b"little"):
        raise ValueError("its numbers are not little endian")
    reader = TensorConstructions(path, folder, members)
    return unpickle(archive.read(pickles[0]), reader.constructions, STORAGE_NAMES, reader.storage)


class TensorConstructions:
    """The constructions that PyTorch pickles tensors with, each checked against the members of the archive."""

    def __init__(self, path: Path, folder: str, members: dict[str, zipfile.ZipInfo]) -> None:
        self._path = path
        self._folder = folder
        self._members = members
        self.constructions: dict[str, Construction] = {
            "collections.OrderedDict": self.ordered_dict,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_parameter": self.parameter,
            "torch.Size": lambda arguments: arguments[0] if arguments and isinstance(arguments[0], tuple) else (),
            "torch.device": lambda arguments: None,
        }

    def storage(self, arguments: tuple[Any, ...]) -> Storage:
        """Return the storage of a reference ("storage", type, member, device, count)."""
        match arguments[0]:
            case ("storage", GlobalName() as kind, str() as key, str(), int() as count) if (
                kind.name in DTYPES and count >= 0
            ):
                dtype = DTYPES[kind.name]
                return Storage(self._offset(f"{self._folder}data/{key}", count * dtype.itemsize), dtype, count)
        raise RefusedPickleError("it refers to an object that is not the storage of a tensor")

    def _offset(self, name: str, needed: int) -> int:
        """Return the offset in the file of a member's content, which has ``needed`` bytes or more."""
        if name not in self._members:
            raise ValueError(f"its part {name} is missing")
        member = self._members[name]
        _require_stored(member)
        with open_file(self._path) as file:
            file.seek(member.header_offset)
            header = file.read(LOCAL_HEADER)
        if len(header) < LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise ValueError(f"its part {name} has no header")
        # The name and an extra field of variable length follow the header.
        lengths = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = member.header_offset + LOCAL_HEADER + lengths
        size = self._path.stat().st_size
        if member.file_size < needed or start + member.file_size > size:
            raise ValueError(
                f"its part {name} has {member.file_size} bytes and {needed} are needed, the file ends at {size}"
            )
        return start

    def tensor(self, arguments: tuple[Any, ...]) -> PickledTensor:
        """Return the tensor of (storage, start, shape, strides, requires_grad, hooks[, metadata])."""
        match arguments[:4]:
            case (Storage() as storage, int() as start, tuple() as shape, tuple() as strides):
                sizes = (start, *shape, *strides)
                # Bounded count and size, so that computing with them is cheap.
                bounded = all(type(value) is int and 0 <= value < 2**48 for value in sizes)
                if bounded and len(sizes) <= 2 * MOST_AXES + 1:
                    span = value_span(shape, strides)
                    if len(shape) != len(strides) or start + span > storage.count or math.prod(shape) > max(span, 1):
                        raise ValueError(f"it has a tensor of shape {list(shape)} in {storage.count} values")
                    return PickledTensor(self._path, storage, start, shape, strides)
        raise RefusedPickleError("it has a tensor without storage, shape and strides")

    def parameter(self, arguments: tuple[Any, ...]) -> PickledTensor:
        """Return the tensor of a parameter."""
        if not arguments or not isinstance(arguments[0], PickledTensor):
            raise RefusedPickleError("it has a parameter without a tensor")
        return arguments[0]

    def ordered_dict(self, arguments: tuple[Any, ...]) -> dict[Any, Any]:
        """Return an empty dictionary."""
        if arguments:
            raise RefusedPickleError("it constructs an OrderedDict with content")
        return {}


def _require_stored(member: zipfile.ZipInfo) -> None:
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ValueError(f"its part {member.filename} is compressed or encrypted, which torch.save never does")


def value_span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the count of values from the first of a tensor to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=False))


def unpickle(
    content: bytes, constructions: Mapping[str, Construction], names: frozenset[str], persistent: Construction
) -> Any:
    """Return the value of a pickle that consists of None, numbers, text, tuples, lists, dictionaries and constructions.

    Arguments:
        constructions: the result of calling each allowed global, by its full name. No other global is called.
        names: additional globals that may appear as values.
        persistent: the result of a reference to an object outside the pickle.

    Raises:
        RefusedPickleError: the content is damaged or uses any other instruction.
    """
    machine = PickleMachine(constructions, names, persistent)
    try:
        for step, (code, argument, _) in enumerate(pickletools.genops(content)):
            if step > MOST_STEPS:
                raise RefusedPickleError(f"it has over {MOST_STEPS:,} instructions")
            machine.execute(code.name, argument)
    except RefusedPickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, StopIteration, RecursionError) as error:
        raise RefusedPickleError(f"it is an incomplete pickle ({type(error).__name__}: {error})") from None
    if len(machine.stack) != 1:
        raise RefusedPickleError(f"it leaves {len(machine.stack)} values on the stack instead of 1")
    return machine.stack[0]


class PickleMachine:
    """The stack and the memo of a pickle, and the instructions that change them."""

    def __init__(
        self, constructions: Mapping[str, Construction], names: frozenset[str], persistent: Construction
    ) -> None:
        self.stack: list[Any] = []
        self._constructions = constructions
        self._names = names
        self._persistent = persistent
        self._memo: dict[int, Any] = {}

    def execute(self, code: str, argument: Any) -> None:
        """Execute one instruction, named as in pickletools."""
        stack = self.stack
        match code:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "INT" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "FLOAT" | "BINFLOAT":
                stack.append(argument)
            case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING" | "BINBYTES" | "SHORT_BINBYTES":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(code == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                stack.append(MARK)
            case "POP":
                stack.pop()
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(code[-1])
                if len(stack) < count:
                    raise IndexError("pop from an empty stack")
                stack[-count:] = [tuple(stack[-count:])]
            case "LIST":
                stack.append(self._pop_to_mark())
            case "DICT":
                items = self._pop_to_mark()
                stack.append({})
                self._set_items(items)
            case "APPEND":
                item = stack.pop()
                self._container(list).append(item)
            case "APPENDS":
                items = self._pop_to_mark()
                self._container(list).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "GLOBAL":
                module, _, name = argument.partition(" ")
                self._push_global(module, name)
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                self._push_global(str(module), str(name))
            case "BINPERSID":
                stack.append(self._persistent((stack.pop(),)))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                construction = self._constructions.get(str(function)) if isinstance(function, GlobalName) else None
                if construction is None or not isinstance(arguments, tuple):
                    raise RefusedPickleError(
                        f"it calls {describe_value(function)}, which is not a tensor and is not run"
                    )
                stack.append(construction(arguments))
            case "BUILD":
                # Drop attributes of a dictionary (`_metadata` of a state_dict). No other object has attributes.
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise RefusedPickleError(f"it sets attributes of {describe_value(stack[-1])}")
            case _:
                raise RefusedPickleError(f"it has the instruction {code}, which a dictionary of tensors does not need")

    def _push_global(self, module: str, name: str) -> None:
        value = GlobalName(module, name)
        if str(value) not in self._constructions and str(value) not in self._names:
            raise RefusedPickleError(f"it contains {value}, which is not a tensor and is not run")
        self.stack.append(value)

    def _set_items(self, items: list[Any]) -> None:
        container = self._container(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):  # hashing nested tuples could overflow the interpreter's stack
                raise RefusedPickleError(f"it has {describe_value(key)} as the key of a dictionary")
            container[key] = value

    def _container(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise RefusedPickleError(f"it adds items to {describe_value(self.stack[-1])}")
        return self.stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        start = next(index for index in range(len(self.stack) - 1, -1, -1) if self.stack[index] is MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items


def describe_value(value: Any) -> str:
    """Return a short description of a value, whose own text could have any length."""
    return str(value) if isinstance(value, GlobalName) else f"a value of type {type(value).__name__}"
