"""Tensors that ranks save in parts, each what it holds, and that are read as whole ones or as any other part.

A file of parts is a safetensors file whose header says, under ``parts``, the whole tensor's shape and where each part begins.
Nothing depends on the layout they were saved under: a part is read from whatever files hold some of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.train.checkpoint.tensors import HashingWriter, TensorSource, read_metadata, stored_tensors, write_tensors

PARTS = "parts"
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor: the whole one's shape, where in it the part lies, its values."""

    shape: tuple[int, ...]
    slices: Slices
    value: np.ndarray

    @property
    def start(self) -> tuple[int, ...]:
        return tuple(cut.start for cut in self.slices)


@dataclass(frozen=True)
class PartedTensor:
    """A tensor in several files: becomes an array, or a part of one, when it is asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[tuple[int, ...], TensorSource], ...]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.read(tuple(slice(0, size) for size in self.shape)).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """The values at ``slices``, from the files that hold some of them."""
        result = np.empty([cut.stop - cut.start for cut in slices], self.dtype)
        for start, stored in self.parts:
            first = [max(cut.start, begin) for cut, begin in zip(slices, start, strict=True)]
            last = [min(cut.stop, begin + size) for cut, begin, size in zip(slices, start, stored.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                target = _relative(first, last, [cut.start for cut in slices])
                result[target] = np.asarray(stored)[_relative(first, last, start)]
        return result


def read_part(source: Any, slices: Slices) -> np.ndarray:
    """A part of a tensor, whichever way it is held; no more of it is read than must be."""
    return source.read(slices) if isinstance(source, PartedTensor) else np.asarray(source)[slices]


def without_copies(ranks: Sequence[Mapping[str, Part]]) -> list[dict[str, Part]]:
    """The same parts, each with the first rank that has it only."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    chosen: list[dict[str, Part]] = []
    for parts in ranks:
        own = {name: part for name, part in parts.items() if (name, part.start) not in seen}
        seen.update((name, part.start) for name, part in own.items())
        chosen.append(own)
    return chosen


def write_parts(parts: Mapping[str, Part], writer: HashingWriter) -> None:
    """Writes a file of parts."""
    places = {name: {"shape": list(part.shape), "start": list(part.start)} for name, part in parts.items()}
    tensors = {name: part.value for name, part in parts.items()}
    write_tensors(writer, tensors, metadata={PARTS: json.dumps(places)})


def holds_parts(path: Path) -> bool:
    """Whether a safetensors file holds parts of tensors."""
    return PARTS in read_metadata(path)


def read_parts(paths: Sequence[Path]) -> dict[str, PartedTensor]:
    """The whole tensors whose parts are in these files.

    Raises:
        ValueError: parts that do not make a whole, or that disagree about it; names the tensor.
    """
    found: dict[str, list[tuple[tuple[int, ...], TensorSource]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        places = json.loads(read_metadata(path)[PARTS])
        for name, stored in stored_tensors(path).items():
            shape = tuple(places[name]["shape"])
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{path}: tensor {name} is of shape {shape} here and {shapes[name]} in another file")
            found.setdefault(name, []).append((tuple(places[name]["start"]), stored))
    return {name: whole_of_parts(name, shapes[name], parts) for name, parts in found.items()}


def whole_of_parts(
    name: str, shape: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], TensorSource]]
) -> PartedTensor:
    """The tensor of ``shape`` that ``parts`` make, each with where it begins.

    Raises:
        ValueError: they are not the blocks of an even cut, each once: only then none overlap and nothing is missing.
    """
    held = sum(math.prod(stored.shape) for _, stored in parts)
    if held != math.prod(shape):
        raise ValueError(f"the parts of tensor {name} hold {held} of its {math.prod(shape)} values")
    block = parts[0][1].shape
    places = {start for start, _ in parts}
    if len(places) < len(parts) or not all(_is_block(start, stored.shape, block) for start, stored in parts):
        raise ValueError(f"the parts of tensor {name} overlap")
    return PartedTensor(shape, parts[0][1].dtype, tuple(parts))


def _is_block(start: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, ...]) -> bool:
    return shape == block and all(first % size == 0 for first, size in zip(start, block, strict=True))


def _relative(first: Sequence[int], last: Sequence[int], origin: Sequence[int]) -> Slices:
    return tuple(slice(a - o, b - o) for a, b, o in zip(first, last, origin, strict=True))
