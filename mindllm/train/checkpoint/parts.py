"""Tensors that ranks save in parts, each what it holds, and that are read as whole ones or as any other part.

A file of parts is a safetensors file whose header says, under ``parts``, the whole tensor's shape and where each part begins.
Nothing depends on the layout they were saved under: a part is read from whatever files hold some of it.
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
    """What a rank holds of a tensor: the whole one's shape, where in it the part lies, its values.

    ``replica`` counts the ranks before this one that hold the same part: the one with 0 writes it.
    """

    shape: tuple[int, ...]
    slices: Slices
    value: TensorSource
    replica: int = 0

    @property
    def start(self) -> tuple[int, ...]:
        return tuple(cut.start for cut in self.slices)

    @property
    def is_whole(self) -> bool:
        return tuple(self.value.shape) == self.shape


@dataclass(frozen=True)
class RankTensors:
    """What a rank keeps of a run, by name: a :class:`Part`, or a whole tensor where every rank holds all of it."""

    weights: Mapping[str, Part | TensorSource]
    optimizer: Mapping[str, Part | TensorSource]

    def on_host(self) -> RankTensors:
        """The same values in arrays that training does not change: what is written while it goes on."""
        return RankTensors(_copied(self.weights), _copied(self.optimizer))


def _copied(tensors: Mapping[str, Part | TensorSource]) -> dict[str, Part | TensorSource]:
    return {
        name: replace(item, value=np.array(item.value)) if isinstance(item, Part) else np.array(item)
        for name, item in tensors.items()
    }


@dataclass(frozen=True)
class PartedTensor:
    """A tensor in several files or arrays: becomes an array, or a part of one, when it is asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[tuple[int, ...], TensorSource], ...]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.read(tuple(slice(0, size) for size in self.shape)).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """The values at ``slices``, from those that hold some of them."""
        result = np.zeros([cut.stop - cut.start for cut in slices], self.dtype)
        for start, stored in self.parts:
            first = [max(cut.start, begin) for cut, begin in zip(slices, start, strict=True)]
            last = [min(cut.stop, begin + size) for cut, begin, size in zip(slices, start, stored.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                target = _relative(first, last, [cut.start for cut in slices])
                result[target] = read_slices(stored, _relative(first, last, start))
        return result


def as_parts(tensors: Mapping[str, Part | TensorSource], rank: int) -> dict[str, Part]:
    """``tensors`` of ``rank`` as parts: a whole tensor is held by every rank, so it is the first one's to write."""
    return {name: item if isinstance(item, Part) else _whole_part(item, rank) for name, item in tensors.items()}


def whole_tensors(tensors: Mapping[str, Part | TensorSource]) -> dict[str, TensorSource] | None:
    """The tensors of a rank that holds all of each; None where it holds a part of one."""
    whole: dict[str, TensorSource] = {}
    for name, item in tensors.items():
        if isinstance(item, Part) and not item.is_whole:
            return None
        whole[name] = item.value if isinstance(item, Part) else item
    return whole


def _whole_part(tensor: TensorSource, rank: int) -> Part:
    return Part(tuple(tensor.shape), tuple(slice(0, size) for size in tensor.shape), tensor, rank)


def without_copies(ranks: Mapping[int, Mapping[str, Part]]) -> dict[int, dict[str, Part]]:
    """The same parts, each with the first rank that has it only."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    chosen: dict[int, dict[str, Part]] = {}
    for rank, parts in ranks.items():
        own = {name: part for name, part in parts.items() if part.replica == 0 and (name, part.start) not in seen}
        seen.update((name, part.start) for name, part in own.items())
        chosen[rank] = own
    return chosen


def write_parts(parts: Mapping[str, Part], writer: HashingWriter) -> None:
    """Writes a file of parts."""
    places = {name: {"shape": list(part.shape), "start": list(part.start)} for name, part in parts.items()}
    tensors = {name: part.value for name, part in parts.items()}
    write_tensors(writer, tensors, metadata={PARTS: json.dumps(places)})


def holds_parts(path: Path) -> bool:
    """Whether a safetensors file holds parts of tensors."""
    return PARTS in read_metadata(path)


def read_parts(paths: Sequence[Path], incomplete: bool = False) -> dict[str, PartedTensor]:
    """The whole tensors whose parts are in these files; what is in none of them is zero, if they may be ``incomplete``.

    Raises:
        ValueError: parts that do not make a whole, or that disagree about it; names the tensor.
    """
    found: dict[str, list[tuple[tuple[int, ...], TensorSource]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        places = parse_json(read_metadata(path)[PARTS])
        for name, stored in stored_tensors(path).items():
            shape = tuple(places[name]["shape"])
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{path}: tensor {name} is of shape {shape} here and {shapes[name]} in another file")
            found.setdefault(name, []).append((tuple(places[name]["start"]), stored))
    if incomplete:
        return {name: PartedTensor(shapes[name], parts[0][1].dtype, tuple(parts)) for name, parts in found.items()}
    return {name: whole_of_parts(name, shapes[name], parts) for name, parts in found.items()}


def joined(ranks: Iterable[Mapping[str, Part | TensorSource]]) -> dict[str, PartedTensor]:
    """The whole tensors whose parts these ranks keep; nothing is copied before a tensor is asked for.

    Raises:
        ValueError: other processes keep parts of them.
    """
    found: dict[str, list[Part]] = {}
    for tensors in ranks:
        for name, part in as_parts(tensors, 0).items():
            found.setdefault(name, []).append(part)
    return {
        name: whole_of_parts(name, parts[0].shape, [(part.start, part.value) for part in parts])
        for name, parts in found.items()
    }


def whole_of_parts(
    name: str, shape: tuple[int, ...], found: Sequence[tuple[tuple[int, ...], TensorSource]]
) -> PartedTensor:
    """The tensor of ``shape`` that the parts ``found`` make, each with where it begins.

    Of copies that several ranks wrote (``remove_redundancy: false``) the first is taken.

    Raises:
        ValueError: they are not the blocks of an even cut: only then none overlap and nothing is missing.
    """
    once = {(start, tuple(stored.shape)): (start, stored) for start, stored in reversed(found)}
    parts = sorted(once.values(), key=lambda item: item[0])
    held = sum(math.prod(stored.shape) for _, stored in parts)
    if held != math.prod(shape):
        raise ValueError(f"the parts of tensor {name} hold {held} of its {math.prod(shape)} values")
    block = tuple(parts[0][1].shape)
    places = {start for start, _ in parts}
    if len(places) < len(parts) or not all(_is_block(start, tuple(stored.shape), block) for start, stored in parts):
        raise ValueError(f"the parts of tensor {name} overlap")
    return PartedTensor(shape, parts[0][1].dtype, tuple(parts))


def _is_block(start: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, ...]) -> bool:
    return shape == block and all(first % size == 0 for first, size in zip(start, block, strict=True))


def _relative(first: Sequence[int], last: Sequence[int], origin: Sequence[int]) -> Slices:
    return tuple(slice(a - o, b - o) for a, b, o in zip(first, last, origin, strict=True))
