"""Tensors in parts: each rank saves the parts it has, and any block of the whole tensor can be read back.

A file of parts is a safetensors file whose header has, under ``parts``, the shape of each whole tensor and the start of its part.
Reading does not depend on the layout of the ranks that saved them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mindllm.outside import parse_json
from mindllm.train.checkpoint.tensors import (
    HashingWriter,
    Slices,
    TensorSource,
    read_metadata,
    read_slices,
    stored_tensors,
    write_tensors,
)

PARTS = "parts"


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor: the shape of the whole tensor, the place of the part in it, and its values.

    ``replica`` counts the lower ranks with an equal part: replica 0 writes it.
    """

    shape: tuple[int, ...]
    slices: Slices
    value: TensorSource
    replica: int = 0

    @property
    def start(self) -> tuple[int, ...]:
        return tuple(cut.start for cut in self.slices)

    @property
    def is_complete(self) -> bool:
        return tuple(self.value.shape) == self.shape


@dataclass(frozen=True)
class RankTensors:
    """A rank's tensors by name: a :class:`Part`, or a tensor that every rank has completely."""

    weights: Mapping[str, Part | TensorSource]
    optimizer: Mapping[str, Part | TensorSource]

    def on_host(self) -> RankTensors:
        """Copy the values to arrays that training does not change, so that they can be written meanwhile."""
        return RankTensors(_copy(self.weights), _copy(self.optimizer))


def _copy(tensors: Mapping[str, Part | TensorSource]) -> dict[str, Part | TensorSource]:
    return {
        name: replace(item, value=np.array(item.value)) if isinstance(item, Part) else np.array(item)
        for name, item in tensors.items()
    }


@dataclass(frozen=True)
class PartedTensor:
    """A tensor in several files or arrays, assembled each time it becomes an array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[tuple[int, ...], TensorSource], ...]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.read(tuple(slice(0, size) for size in self.shape)).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """Read the values at ``slices`` from the parts that overlap them."""
        result = np.zeros([cut.stop - cut.start for cut in slices], self.dtype)
        for start, stored in self.parts:
            first = [max(cut.start, begin) for cut, begin in zip(slices, start, strict=True)]
            last = [min(cut.stop, begin + size) for cut, begin, size in zip(slices, start, stored.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                target = _relative(first, last, [cut.start for cut in slices])
                result[target] = read_slices(stored, _relative(first, last, start))
        return result


def split_parts(tensors: Mapping[str, Part | TensorSource], rank: int) -> dict[str, Part]:
    """Return the tensors of ``rank`` as parts. Every rank has a complete tensor, so only the first one writes it."""
    parts = {}
    for name, item in tensors.items():
        slices = tuple(slice(0, size) for size in item.shape)
        parts[name] = item if isinstance(item, Part) else Part(tuple(item.shape), slices, item, rank)
    return parts


def complete_tensors(tensors: Mapping[str, Part | TensorSource]) -> dict[str, TensorSource] | None:
    """Return the tensors of a rank if all of them are complete, or None."""
    tensors_by_name: dict[str, TensorSource] = {}
    for name, item in tensors.items():
        if isinstance(item, Part) and not item.is_complete:
            return None
        tensors_by_name[name] = item.value if isinstance(item, Part) else item
    return tensors_by_name


def drop_replicas(ranks: Mapping[int, Mapping[str, Part]]) -> dict[int, dict[str, Part]]:
    """Return each part only for the first rank that has it."""
    written: set[tuple[str, tuple[int, ...]]] = set()
    chosen: dict[int, dict[str, Part]] = {}
    for rank, parts in ranks.items():
        first = {name: part for name, part in parts.items() if part.replica == 0 and (name, part.start) not in written}
        written.update((name, part.start) for name, part in first.items())
        chosen[rank] = first
    return chosen


def write_parts(parts: Mapping[str, Part], writer: HashingWriter) -> None:
    """Write a file of parts."""
    places = {name: {"shape": list(part.shape), "start": list(part.start)} for name, part in parts.items()}
    tensors = {name: part.value for name, part in parts.items()}
    write_tensors(writer, tensors, metadata={PARTS: json.dumps(places)})


def has_parts(path: Path) -> bool:
    """Return True if a safetensors file has parts of tensors."""
    return PARTS in read_metadata(path)


def read_parts(paths: Sequence[Path], incomplete: bool = False) -> dict[str, PartedTensor]:
    """Return the whole tensors whose parts are in these files. With ``incomplete``, missing values are zero.

    Raises:
        ValueError: parts do not make a whole tensor or disagree about its shape; names the tensor.
    """
    pieces: dict[str, list[tuple[tuple[int, ...], TensorSource]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        places = parse_json(read_metadata(path)[PARTS])
        for name, stored in stored_tensors(path).items():
            shape = tuple(places[name]["shape"])
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{path}: tensor {name} has shape {shape}, and {shapes[name]} in another file")
            pieces.setdefault(name, []).append((tuple(places[name]["start"]), stored))
    if incomplete:
        return {name: PartedTensor(shapes[name], parts[0][1].dtype, tuple(parts)) for name, parts in pieces.items()}
    return {name: join_parts(name, shapes[name], parts) for name, parts in pieces.items()}


def join_ranks(ranks: Iterable[Mapping[str, Part | TensorSource]]) -> dict[str, PartedTensor]:
    """Return the whole tensors of these ranks, assembled when a tensor becomes an array.

    Raises:
        ValueError: other processes have some of the parts.
    """
    by_name: dict[str, list[Part]] = {}
    for tensors in ranks:
        for name, part in split_parts(tensors, 0).items():
            by_name.setdefault(name, []).append(part)
    return {
        name: join_parts(name, parts[0].shape, [(part.start, part.value) for part in parts])
        for name, parts in by_name.items()
    }


def join_parts(
    name: str, shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], TensorSource]]
) -> PartedTensor:
    """Return the tensor of ``shape`` that consists of ``pieces``, each with its start.

    If several ranks wrote equal pieces (``remove_redundancy: false``), the first is used.

    Raises:
        ValueError: the pieces are not the blocks of an even cut, so that some overlap or are missing.
    """
    distinct = {(start, tuple(stored.shape)): (start, stored) for start, stored in reversed(pieces)}
    parts = sorted(distinct.values(), key=lambda item: item[0])
    count = sum(math.prod(stored.shape) for _, stored in parts)
    if count != math.prod(shape):
        raise ValueError(f"the parts of tensor {name} have {count} of its {math.prod(shape)} values")
    block = tuple(parts[0][1].shape)
    even = len({start for start, _ in parts}) == len(parts)
    for start, stored in parts:
        aligned = all(first % size == 0 for first, size in zip(start, block, strict=True))
        even = even and tuple(stored.shape) == block and aligned
    if not even:
        raise ValueError(f"the parts of tensor {name} overlap")
    return PartedTensor(shape, parts[0][1].dtype, tuple(parts))


def _relative(first: Sequence[int], last: Sequence[int], origin: Sequence[int]) -> Slices:
    return tuple(slice(a - o, b - o) for a, b, o in zip(first, last, origin, strict=True))
