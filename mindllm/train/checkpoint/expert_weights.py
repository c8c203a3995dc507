"""Weights of experts: all in one tensor here, one for each expert or other stacks in files. No more is read than asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.families.weight_table import EXPERT, LAYER, FusedExperts, WeightTable
from mindllm.train.checkpoint.tensors import Slices, TensorSource, read_slices


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
