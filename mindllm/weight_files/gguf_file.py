"""The tensors of a GGUF file under Hugging Face's names, dequantized when a tensor becomes an array."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.gguf import (
    FREQUENCIES,
    TYPES,
    GgufArchitecture,
    StoredBlocks,
    architecture_config,
    find_architecture,
    hugging_face_name,
    read_header,
)
from mindllm.train.checkpoint.tensors import DTYPES, LazyTensor, Slices, StoredTensor, TensorSource
from mindllm.weight_files.family_weights import slice_expert

PLAIN = {"F32", "F16", "BF16", "F64"}
VALUES_AT_A_TIME = 1 << 22  # the package's temporary arrays take several times as much
TYPE_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in blocks of codes, dequantized to fp32 by the package ``gguf`` each time it becomes an array."""

    blocks: StoredBlocks

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        rows = math.prod(self.shape[:-1])
        return self._dequantize(0, rows).reshape(self.shape).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """Return the values at ``slices``. Only rows between the first and the last of them are dequantized."""
        if not slices or not isinstance(slices[0], slice) or len(self.shape) < 2:
            return np.asarray(self)[slices]
        start, stop, step = slices[0].indices(self.shape[0])
        if step != 1 or stop <= start:
            return np.asarray(self)[slices]
        below = math.prod(self.shape[1:-1])
        values = self._dequantize(start * below, stop * below).reshape((stop - start, *self.shape[1:]))
        inner = (slice(None), *slices[1:])
        return values[inner]

    def _dequantize(self, start: int, stop: int) -> np.ndarray:
        """Return rows of the last dimension, ``[stop - start, width]``."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        width = self.shape[-1]
        _, values, size = TYPES[TYPE_NUMBERS[self.blocks.type]]
        row_bytes = width // values * size
        result = np.empty((stop - start, width), np.float32)
        step = max(1, VALUES_AT_A_TIME // max(width, 1))
        for first in range(start, stop, step):
            count = min(step, stop - first)
            codes = np.fromfile(self.path, np.uint8, count * row_bytes, offset=self.blocks.offset + first * row_bytes)
            result[first - start : first - start + count] = dequantize(
                codes.reshape(count, row_bytes), GGMLQuantizationType[self.blocks.type]
            )
        return result


def gguf_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of the model in a GGUF file without reading their values.

    Raises:
        UserError: the file is damaged, or its architecture is unsupported.
    """
    header = read_header(path)
    architecture, config = find_architecture(header), architecture_config(header)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, TensorSource] = {}
    for gguf_name, blocks in header.tensors.items():
        if gguf_name == FREQUENCIES:  # an entry of the architecture
            continue
        source: TensorSource = QuantizedTensor(blocks)
        if blocks.type in PLAIN:
            source = StoredTensor(blocks.path, blocks.offset, blocks.shape, DTYPES[blocks.type])
        name = hugging_face_name(architecture, gguf_name)
        if "{expert}" not in name:
            tensors[name] = _undo_conversion(architecture, heads, name, source)
        elif len(blocks.shape) == 3:
            for expert in range(blocks.shape[0]):
                tensors[name.format(expert=expert)] = slice_expert(source, expert)
        else:
            tensors[gguf_name] = source  # reported as surplus by the reader of the model
    return tensors


def _undo_conversion(
    architecture: GgufArchitecture, heads: Mapping[str, int], name: str, source: TensorSource
) -> TensorSource:
    """Return a tensor as it was before llama.cpp reordered the rows of heads, added 1 to norms, or dropped an axis."""
    path, shape = source.path, tuple(source.shape)  # type: ignore[attr-defined]
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        return LazyTensor((1, *shape), source.dtype, lambda: np.asarray(source)[None], path=path)
    if architecture.norms_plus_one and name.endswith("norm.weight"):
        return LazyTensor(shape, source.dtype, lambda: np.asarray(source) - source.dtype.type(1), path=path)
    part = next((part for part in heads if architecture.rotated and f".{part}." in name), None)
    if part is None or len(shape) not in (1, 2) or shape[0] % (2 * heads[part]):
        return source  # a tensor that does not fit is reported as misshapen by the reader of the model

    def make() -> np.ndarray:
        values = np.asarray(source)
        rows, *rest = values.shape
        pairs = values.reshape(heads[part], rows // heads[part] // 2, 2, *rest)
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))

    return LazyTensor(shape, source.dtype, make, path=path)
