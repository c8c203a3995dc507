"""Our weights out of tensors of a family's files, and back, as its weight table says: lazily, a tensor of theirs at a time.

Weights of experts are in one tensor here, and one for each expert or other stacks in files. No more is read than asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec, RotarySpec
from mindllm.config import ModelConfig
from mindllm.families import family_of
from mindllm.families.weight_table import EMBEDDING, EXPERT, LAYER, FusedExperts, Weight, WeightTable
from mindllm.train.checkpoint.tensors import Slices, TensorSource, read_slices
from mindllm.weight_files.quantized.directory import QuantizedMatrix

Shape = tuple[int, ...]
ROTATED: tuple[str, ...] = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")
ROTATED += ("attention.query_norm.weight", "attention.key_norm.weight")
ROTATED += tuple(f"attention.{name}_rotary.weight" for name in ("wq", "wq_up", "wk"))


@dataclass(frozen=True)
class StackedExperts:
    """The tensors of all experts as one, experts first."""

    parts: Sequence[TensorSource]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.stack([np.asarray(part) for part in self.parts]).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """The values at ``slices``, from the experts in them."""
        return np.stack([read_slices(part, slices[1:]) for part in self.parts[slices[0]]])


@dataclass(frozen=True)
class OneExpert:
    """Rows ``start`` to ``stop`` (all, where None) of one expert's slice of a tensor."""

    source: TensorSource
    expert: int
    start: int = 0
    stop: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        _, rows, *rest = self.source.shape
        return (len(range(rows)[self.start : self.stop]), *rest)

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        rest = tuple(slice(None) for _ in self.source.shape[2:])
        place = (slice(self.expert, self.expert + 1), slice(self.start, self.stop), *rest)
        return np.ascontiguousarray(read_slices(self.source, place)[0]).astype(dtype or self.dtype, copy=False)


def by_expert(found: Mapping[str, TensorSource], table: WeightTable) -> dict[str, TensorSource]:
    """``found`` with the names of ``table``: tensors that hold all experts are taken apart."""
    kept: dict[str, TensorSource] = {}
    for name, source in found.items():
        name = _renamed(name, table)
        fused, layer = _fused(name, table)
        if fused is None or len(source.shape) != 3 or source.shape[1] % len(fused.parts):
            kept[name] = source
            continue
        experts, rows, _ = source.shape
        height = rows // len(fused.parts)
        for expert in range(experts):
            for index, part in enumerate(fused.parts):
                of_expert = part.replace(LAYER, layer).replace(EXPERT, str(expert))
                kept[of_expert] = OneExpert(source, expert, index * height, (index + 1) * height)
    return kept


def _fused(name: str, table: WeightTable) -> tuple[FusedExperts | None, str]:
    layer = _layer_of(name)
    return next((fused for fused in table.fused if fused.theirs.replace(LAYER, layer) == name), None), layer


def _renamed(name: str, table: WeightTable) -> str:
    layer = _layer_of(name)
    return next(
        (ours.replace(LAYER, layer) for theirs, ours in table.aliases if theirs.replace(LAYER, layer) == name), name
    )


def _layer_of(name: str) -> str:
    return (re.findall(r"(?<=\.)\d+(?=\.)", name) or [""])[0]


@dataclass(frozen=True)
class Lazy:
    """An array that is made when it is asked for; ``make`` reads what it is made of then."""

    shape: Shape
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.make(), dtype)


class FamilyWeights:
    """The tensors of the files of ``model``'s family: names and shapes, and the values of each side from the other."""

    def __init__(self, model: ModelConfig) -> None:
        self.table: WeightTable = family_of(model).weights
        self.ours = model.base.architecture.weight_shapes()
        self.attention = model.architecture.layers[0].attention
        self.weights = {weight.theirs: weight for weight in self.table.of(self.ours)}
        layers = range(model.num_layers, model.placed_layers)  # those that predict ahead
        self.copies = {
            theirs.replace(LAYER, str(layer)): EMBEDDING if model.tie_word_embeddings else ours
            for layer in layers
            for theirs, ours in self.table.copies
        }
        self.order = _row_order(self.attention, self.table.neighbours)

    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor of theirs, in the order of our weights."""
        return {name: self._shape(weight) for name, weight in self.weights.items()}

    def read(self, found: Mapping[str, TensorSource]) -> dict[str, tuple[str, TensorSource]]:
        """Our weights by name, each with the tensor of theirs it comes from; ``found`` has all of :meth:`shapes`."""
        taken: dict[str, tuple[str, TensorSource]] = {}
        stacks: dict[str, list[TensorSource]] = {}
        for name, weight in self.weights.items():
            if weight.expert is not None:
                stacks.setdefault(weight.ours[0], []).append(found[name])
                taken[weight.ours[0]] = (name, StackedExperts(stacks[weight.ours[0]]))
                continue
            for ours, source in self.read_one(weight, found[name]).items():
                taken[ours] = (name, source)
        return {ours: taken[ours] for ours in self.ours}

    def write(self, weights: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Their tensors by name, from our weights."""
        written = {name: self.write_one(weight, weights) for name, weight in self.weights.items()}
        return {**written, **{name: weights[ours] for name, ours in self.copies.items()}}

    def read_one(self, weight: Weight, source: TensorSource) -> dict[str, TensorSource]:
        """Our weights in one tensor of theirs that is no expert's."""
        return {ours: self._one_of(weight, index, source) for index, ours in enumerate(weight.ours)}

    def write_one(self, weight: Weight, weights: Mapping[str, TensorSource]) -> TensorSource:
        """One tensor of theirs, from our weights in it."""
        return self._joined(weight, weights)

    def _shape(self, weight: Weight) -> Shape:
        parts = [self.ours[ours] for ours in weight.ours]
        if weight.expert is not None:
            return parts[0][1:]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        return shape[::-1] if weight.transposed else shape

    def _one_of(self, weight: Weight, index: int, source: TensorSource) -> TensorSource:
        ours = weight.ours[index]
        if isinstance(source, QuantizedMatrix):
            return source.rows(self.apart(weight, np.arange(source.whole[0]))[index])
        if len(weight.ours) == 1 and not weight.transposed and not self._reordered(ours):
            return source

        def make() -> np.ndarray:
            values = np.asarray(source)
            return self.apart(weight, values.T if weight.transposed else values)[index]

        return Lazy(self.ours[ours], source.dtype, make)

    def _joined(self, weight: Weight, weights: Mapping[str, TensorSource]) -> TensorSource:
        if weight.expert is not None:
            return OneExpert(weights[weight.ours[0]], weight.expert)
        if len(weight.ours) == 1 and not weight.transposed and not self._reordered(weight.ours[0]):
            return weights[weight.ours[0]]

        def make() -> np.ndarray:
            joined = self.together(weight, [np.asarray(weights[ours]) for ours in weight.ours])
            return np.ascontiguousarray(joined.T if weight.transposed else joined)

        return Lazy(self._shape(weight), weights[weight.ours[0]].dtype, make)

    def apart(self, weight: Weight, values: np.ndarray) -> list[np.ndarray]:
        """What each of our weights has of the rows ``values`` of theirs, in our order."""
        parts = zip(weight.ours, self._split(weight, values), strict=True)
        return [
            np.ascontiguousarray(self._rows(part, self.order) if self._reordered(ours) else part)
            for ours, part in parts
        ]

    def together(self, weight: Weight, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The rows of theirs, in their order, from those of each of our weights."""
        back = np.argsort(self.order)
        turned = [
            self._rows(part, back) if self._reordered(ours) else part
            for ours, part in zip(weight.ours, parts, strict=True)
        ]
        return self._join(weight, turned)

    def _reordered(self, ours: str) -> bool:
        """Whether the rows of a weight of ours stand in another order in their files."""
        return ours.endswith(ROTATED) and not np.array_equal(self.order, np.arange(len(self.order)))

    def _rows(self, values: np.ndarray, order: np.ndarray) -> np.ndarray:
        """The rows of every head in another order."""
        heads = values.reshape(-1, len(order), *values.shape[1:])
        return heads[:, order].reshape(values.shape)

    def _split(self, weight: Weight, values: np.ndarray) -> Sequence[np.ndarray]:
        counts = [self.ours[ours][0] for ours in weight.ours]
        if not weight.by_head:
            return np.split(values, np.cumsum(counts)[:-1])
        groups = self.attention.num_kv_heads
        grouped = values.reshape(groups, -1, *values.shape[1:])
        parts = np.split(grouped, np.cumsum([count // groups for count in counts])[:-1], axis=1)
        return [part.reshape(-1, *values.shape[1:]) for part in parts]

    def _join(self, weight: Weight, parts: Sequence[np.ndarray]) -> np.ndarray:
        if not weight.by_head:
            return np.concatenate(parts)
        groups, rest = self.attention.num_kv_heads, parts[0].shape[1:]
        grouped = np.concatenate([part.reshape(groups, -1, *rest) for part in parts], axis=1)
        return grouped.reshape(-1, *rest)


def _row_order(attention: AttentionSpec | LatentAttentionSpec, neighbours: bool) -> np.ndarray:
    """Which row of a head of theirs each of ours is: ours pair ``i`` with ``i + width / 2``, the turned pairs first.

    The width is that of what positions are applied to: a head, or in latent attention the part of it that is turned.
    """
    width = attention.context.head_dim
    turned = attention.position.rotary_dim if isinstance(attention.position, RotarySpec) else width
    first = np.arange(0, turned, 2) if neighbours else np.arange(turned // 2)
    second = first + 1 if neighbours else first + turned // 2
    left = np.arange(turned, width)
    middle = len(left) // 2
    return np.concatenate([first, left[:middle], second, left[middle:]])
