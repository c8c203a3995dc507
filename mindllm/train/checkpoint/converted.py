"""Tensors in another dtype, converted one at a time when they are needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindllm.errors import UserError
from mindllm.train.checkpoint.tensors import NOT_IN_NUMPY, Slices, TensorSource, read_slices


def numpy_dtype(name: str) -> np.dtype:
    """The dtype ``float32``, ``float16`` or ``bfloat16`` of a configuration."""
    return NOT_IN_NUMPY.get(name) or np.dtype(name)


@dataclass(frozen=True)
class Converted:
    """``source`` rounded to ``dtype`` (to the nearest, ties to even) when it is asked for its array.

    Raises UserError then, naming the tensor, when a finite value would become infinite.
    """

    name: str
    source: TensorSource
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self._rounded(np.asarray(self.source)).astype(dtype or self.dtype, copy=False)

    def read(self, slices: Slices) -> np.ndarray:
        """The values at ``slices``, converted; nothing else is read."""
        return self._rounded(read_slices(self.source, slices))

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            rounded = values.astype(self.dtype, copy=False)
        if rounded is not values and not np.isfinite(rounded).all() and np.isfinite(values).all():
            raise UserError(f"weight {self.name} has values too large for {self.dtype.name}: choose another dtype")
        return rounded
