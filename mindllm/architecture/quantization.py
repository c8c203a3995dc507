"""Projections whose weights are held in codes of 4 or 8 bits, as values. What a code means is in ``mindllm/quantize``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mindllm.architecture.parts import Shapes

CodeName = Literal["uint4", "uint8", "int8", "nf4", "fp4", "e4m3"]
CODES, SCALES, ZEROS, COLUMNS = "codes", "scales", "zeros", "columns"


def bits_of(code: CodeName) -> int:
    """Return the bits of a code: 4 or 8."""
    return 4 if code in ("uint4", "nf4", "fp4") else 8


@dataclass(frozen=True)
class CodeSpec:
    """A projection ``[out, in]`` of a layer that is held in codes; ``group`` columns share a scale."""

    module: str
    out_features: int
    in_features: int
    code: CodeName
    group: int
    has_zeros: bool
    ordered: bool

    def shapes(self) -> Shapes:
        """Return the stored tensors by their names relative to the projection."""
        groups = self.in_features // self.group
        tensors: Shapes = {CODES: (self.out_features, groups, self.group * bits_of(self.code) // 8)}
        tensors[SCALES] = (self.out_features, groups, 1, 1)
        if self.has_zeros:
            tensors[ZEROS] = (self.out_features, groups, 1, 1)
        return {**tensors, **({COLUMNS: (self.in_features,)} if self.ordered else {})}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored tensors."""
        return sum(math.prod(shape) * (1 if name == CODES else 4) for name, shape in self.shapes().items())
