"""The tensors of a GGUF file under the names of Hugging Face's files: codes are dequantized when a tensor is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.gguf.header import TYPES, StoredBlocks, read_header
from mindllm.gguf.model import FREQUENCIES, Kind, config_content, file_name, kind_of
from mindllm.train.checkpoint.tensors import DTYPES, Slices, StoredTensor, TensorSource, read_slices

PLAIN = {"F32", "F16", "BF16", "F64"}  # numbers as they are
AT_A_TIME = 1 << 22  # values that are dequantized at once: the package's own arrays take some times as much


@dataclass(frozen=True)
class CodedTensor:
    """A tensor in blocks of codes; as an array it is fp32, dequantized by the package ``gguf``, every time."""

    stored: StoredBlocks

    @property
    def path(self) -> Path:
        return self.stored.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        rows = math.prod(self.shape[:-1])
        return self._rows(0, rows).reshape(self.shape).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """The values at ``slices``; what is dequantized is rows from the first to the last in its first dimension."""
        if not slices or not isinstance(slices[0], slice) or len(self.shape) < 2:
            return np.asarray(self)[slices]
        start, stop, step = slices[0].indices(self.shape[0])
        if step != 1 or stop <= start:
            return np.asarray(self)[slices]
        below = math.prod(self.shape[1:-1])
        values = self._rows(start * below, stop * below).reshape((stop - start, *self.shape[1:]))
        inner = (slice(None), *slices[1:])
        return values[inner]

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of the last dimension, ``[stop - start, width]``."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        width = self.shape[-1]
        _, values, size = TYPES[_NUMBERS[self.stored.type]]
        row = width // values * size
        found = np.empty((stop - start, width), np.float32)
        step = max(1, AT_A_TIME // max(width, 1))
        for first in range(start, stop, step):
            count = min(step, stop - first)
            codes = np.fromfile(self.path, np.uint8, count * row, offset=self.stored.offset + first * row)
            found[first - start : first - start + count] = dequantize(
                codes.reshape(count, row), GGMLQuantizationType[self.stored.type]
            )
        return found


_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}


@dataclass(frozen=True)
class Undone:
    """A tensor as it was before llama.cpp changed it: rows of ``heads`` heads in their order, or without the 1 of a norm."""

    source: TensorSource
    heads: int = 0
    plus_one: bool = False
    shape_before: tuple[int, ...] | None = None

    @property
    def path(self) -> Path:
        return self.source.path  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_before or self.source.shape

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        values = np.asarray(self.source)
        if self.heads:
            rows, *rest = values.shape
            values = values.reshape(self.heads, rows // self.heads // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)
        if self.plus_one:
            values = values - values.dtype.type(1)
        return np.ascontiguousarray(values).reshape(self.shape).astype(dtype or self.dtype, copy=False)


@dataclass(frozen=True)
class ExpertOfStack:
    """The slice of one expert in a tensor of all of them."""

    source: TensorSource
    expert: int

    @property
    def path(self) -> Path:
        return self.source.path  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.read(tuple(slice(None) for _ in self.shape)).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """The values at ``slices``; no other expert is read."""
        return read_slices(self.source, (slice(self.expert, self.expert + 1), *slices))[0]


def gguf_tensors(path: Path) -> dict[str, Any]:
    """The tensors of the model in a GGUF file; none is read yet.

    Raises:
        UserError: the file is damaged, or its architecture is not read.
    """
    header = read_header(path)
    kind, content = kind_of(header), config_content(header)
    heads = {"q_proj": content["num_attention_heads"], "k_proj": content["num_key_value_heads"]}
    return {
        name: tensor
        for theirs, stored in header.tensors.items()
        if theirs != FREQUENCIES
        for name, tensor in _named(kind, heads, theirs, stored)
    }


def _named(
    kind: Kind, heads: Mapping[str, int], theirs: str, stored: StoredBlocks
) -> Iterator[tuple[str, TensorSource]]:
    """A tensor by its name, or those of the experts in it."""
    name, source = file_name(kind, theirs), _source(stored)
    if "{expert}" not in name:
        yield name, _undone(kind, heads, name, source)
    elif len(stored.shape) == 3:
        for expert in range(stored.shape[0]):
            yield name.format(expert=expert), ExpertOfStack(source, expert)
    else:
        yield theirs, source  # whoever reads the model says that it is surplus


def _source(stored: StoredBlocks) -> TensorSource:
    if stored.type in PLAIN:
        return StoredTensor(stored.path, stored.offset, stored.shape, DTYPES[stored.type])
    return CodedTensor(stored)


def _undone(kind: Kind, heads: Mapping[str, int], name: str, source: TensorSource) -> TensorSource:
    if name.endswith("shared_expert_gate.weight") and len(source.shape) == 1:
        return Undone(source, shape_before=(1, *source.shape))
    if kind.norms_plus_one and name.endswith("norm.weight"):
        return Undone(source, plus_one=True)
    part = next((part for part in heads if kind.rotated and f".{part}." in name), None)
    if part is None or len(source.shape) not in (1, 2) or source.shape[0] % (2 * heads[part]):
        return source  # one that does not fit is misshapen, which whoever reads the model says
    return Undone(source, heads=heads[part])
