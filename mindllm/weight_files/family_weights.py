"""Conversion between a model's weights and the tensors in the files of its family, one tensor at a time.

The weight table of the family defines the conversion. The experts of a layer are one weight, and in files one tensor per expert
or other stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec, RotarySpec
from mindllm.config import ModelConfig
from mindllm.families import family_of
from mindllm.families.weight_table import EMBEDDING, EXPERT, LAYER, Weight, WeightTable
from mindllm.train.checkpoint.tensors import LazyTensor, Slices, TensorSource, read_slices
from mindllm.weight_files.quantized import QuantizedMatrix

Shape = tuple[int, ...]
ROTATED: tuple[str, ...] = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")
ROTATED += ("attention.query_norm.weight", "attention.key_norm.weight")
ROTATED += tuple(f"attention.{name}_rotary.weight" for name in ("wq", "wq_up", "wk"))


def stack_experts(experts: Sequence[TensorSource]) -> LazyTensor:
    """Return the tensors of all experts as one, with experts as the first axis."""
    shape, dtype = (len(experts), *experts[0].shape), experts[0].dtype

    def read(slices: Slices) -> np.ndarray:
        return np.stack([read_slices(expert, slices[1:]) for expert in experts[slices[0]]])

    return LazyTensor(shape, dtype, lambda: np.stack([np.asarray(expert) for expert in experts]), read)


def slice_expert(source: TensorSource, expert: int, start: int = 0, stop: int | None = None) -> LazyTensor:
    """Return rows ``start`` to ``stop`` (None: all) of one expert in a tensor of all experts."""
    _, rows, *rest = source.shape
    shape = (len(range(rows)[start:stop]), *rest)
    path = getattr(source, "path", None)

    def make() -> np.ndarray:
        place = (slice(expert, expert + 1), slice(start, stop), *(slice(None) for _ in rest))
        return np.ascontiguousarray(read_slices(source, place)[0])

    def read(slices: Slices) -> np.ndarray:
        return read_slices(source, (slice(expert, expert + 1), *slices))[0]

    # Slices of a part would have to be shifted by its start.
    return LazyTensor(shape, source.dtype, make, read if shape[0] == rows else None, path)


def split_fused_experts(tensors: Mapping[str, TensorSource], table: WeightTable) -> dict[str, TensorSource]:
    """Return the tensors by the names of ``table``, with one tensor per expert for each that has all experts."""
    result: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        layer = (re.findall(r"(?<=\.)\d+(?=\.)", name) or [""])[0]
        aliases = {alias.replace(LAYER, layer): target.replace(LAYER, layer) for alias, target in table.aliases}
        name = aliases.get(name, name)
        fused = next((fused for fused in table.fused if fused.theirs.replace(LAYER, layer) == name), None)
        if fused is None or len(source.shape) != 3 or source.shape[1] % len(fused.parts):
            result[name] = source
            continue
        experts, rows, _ = source.shape
        height = rows // len(fused.parts)
        for expert in range(experts):
            for index, part in enumerate(fused.parts):
                expert_name = part.replace(LAYER, layer).replace(EXPERT, str(expert))
                result[expert_name] = slice_expert(source, expert, index * height, (index + 1) * height)
    return result


class FamilyWeights:
    """Names and shapes of the tensors in the files of ``model``'s family, and the conversion in both directions.

    Attributes:
        ours: shapes of the model's weights.
        weights: the entries of the family's table by the name of the tensor in files.
        copies: tensors in files that repeat a weight, by name.
        order: row order of a head, see :func:`head_row_order`.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.table: WeightTable = family_of(model).weights
        self.ours = model.base.architecture.weight_shapes()
        self.attention = model.architecture.layers[0].attention
        self.weights = {weight.theirs: weight for weight in self.table.of(self.ours)}
        prediction_layers = range(model.num_layers, model.placed_layers)
        self.copies = {
            file_name.replace(LAYER, str(layer)): EMBEDDING if model.tie_word_embeddings else name
            for layer in prediction_layers
            for file_name, name in self.table.copies
        }
        self.order = head_row_order(self.attention, self.table.neighbours)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor in files, in the order of the model's weights."""
        return {name: self._file_shape(weight) for name, weight in self.weights.items()}

    def read(self, tensors: Mapping[str, TensorSource]) -> dict[str, tuple[str, TensorSource]]:
        """Return the model's weights by name, each with the name of its tensor. ``tensors`` has all of :meth:`shapes`."""
        converted: dict[str, tuple[str, TensorSource]] = {}
        experts: dict[str, list[TensorSource]] = {}
        for file_name, weight in self.weights.items():
            if weight.expert is None:
                for name, source in self.read_tensor(weight, tensors[file_name]).items():
                    converted[name] = (file_name, source)
            else:
                name = weight.ours[0]
                experts.setdefault(name, []).append(tensors[file_name])
                converted[name] = (file_name, tensors[file_name])
        for name, stack in experts.items():
            converted[name] = (converted[name][0], stack_experts(stack))
        return {name: converted[name] for name in self.ours}

    def write(self, weights: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Return the tensors in files by name, from the model's weights."""
        tensors = {name: self.write_tensor(weight, weights) for name, weight in self.weights.items()}
        return {**tensors, **{file_name: weights[name] for file_name, name in self.copies.items()}}

    def read_tensor(self, weight: Weight, source: TensorSource) -> dict[str, TensorSource]:
        """Return the model's weights in one tensor that is not an expert's."""
        if isinstance(source, QuantizedMatrix):
            rows = self.split(weight, np.arange(source.matrix_shape[0]))
            return {name: source.rows(part) for name, part in zip(weight.ours, rows, strict=True)}
        if self._is_equal(weight):
            return {weight.ours[0]: source}

        def make_part(index: int) -> np.ndarray:
            values = np.asarray(source)
            return self.split(weight, values.T if weight.transposed else values)[index]

        return {
            name: LazyTensor(self.ours[name], source.dtype, lambda index=index: make_part(index))  # type: ignore[misc]
            for index, name in enumerate(weight.ours)
        }

    def write_tensor(self, weight: Weight, weights: Mapping[str, TensorSource]) -> TensorSource:
        """Return one tensor in files, from the model's weights in it."""
        first = weights[weight.ours[0]]
        if weight.expert is not None:
            return slice_expert(first, weight.expert)
        if self._is_equal(weight):
            return first

        def make() -> np.ndarray:
            values = self.join(weight, [np.asarray(weights[name]) for name in weight.ours])
            return np.ascontiguousarray(values.T if weight.transposed else values)

        return LazyTensor(self._file_shape(weight), first.dtype, make)

    def split(self, weight: Weight, values: np.ndarray) -> list[np.ndarray]:
        """Return the rows of each of the model's weights in the rows ``values`` of a tensor in files."""
        counts = [self.ours[name][0] for name in weight.ours]
        rest = values.shape[1:]
        if weight.by_head:
            groups = self.attention.num_kv_heads
            ends = np.cumsum([count // groups for count in counts])[:-1]
            grouped = np.split(values.reshape(groups, -1, *rest), ends, axis=1)
            parts = [part.reshape(-1, *rest) for part in grouped]
        else:
            parts = np.split(values, np.cumsum(counts)[:-1])
        return [
            np.ascontiguousarray(self._reorder(name, part, self.order))
            for name, part in zip(weight.ours, parts, strict=True)
        ]

    def join(self, weight: Weight, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the rows of a tensor in files from the rows of each of the model's weights."""
        inverse = np.argsort(self.order)
        parts = [self._reorder(name, part, inverse) for name, part in zip(weight.ours, parts, strict=True)]
        if not weight.by_head:
            return np.concatenate(parts)
        groups, rest = self.attention.num_kv_heads, parts[0].shape[1:]
        grouped = np.concatenate([part.reshape(groups, -1, *rest) for part in parts], axis=1)
        return grouped.reshape(-1, *rest)

    def _file_shape(self, weight: Weight) -> Shape:
        parts = [self.ours[name] for name in weight.ours]
        if weight.expert is not None:
            return parts[0][1:]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        return shape[::-1] if weight.transposed else shape

    def _is_equal(self, weight: Weight) -> bool:
        """Return True if a tensor in files equals the only weight in it."""
        return len(weight.ours) == 1 and not weight.transposed and not self._is_reordered(weight.ours[0])

    def _is_reordered(self, name: str) -> bool:
        return name.endswith(ROTATED) and not np.array_equal(self.order, np.arange(len(self.order)))

    def _reorder(self, name: str, values: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Return the rows of every head in ``order``, if positions rotate this weight."""
        if not self._is_reordered(name):
            return values
        heads = values.reshape(-1, len(order), *values.shape[1:])
        return heads[:, order].reshape(values.shape)


def head_row_order(attention: AttentionSpec | LatentAttentionSpec, neighbors: bool) -> np.ndarray:
    """Return for each row of a head its row in files.

    The model pairs rows ``i`` and ``i + width / 2``, rotated pairs first. The width is that of the rotated part: a head, or in
    latent attention a part of it.

    Arguments:
        neighbors: files pair rows ``2i`` and ``2i + 1``.
    """
    width = attention.context.head_dim
    rotated = attention.position.rotary_dim if isinstance(attention.position, RotarySpec) else width
    first = np.arange(0, rotated, 2) if neighbors else np.arange(rotated // 2)
    second = first + 1 if neighbors else first + rotated // 2
    rest = np.arange(rotated, width)
    middle = len(rest) // 2
    return np.concatenate([first, rest[:middle], second, rest[middle:]])
