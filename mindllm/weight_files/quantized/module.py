"""The tensors of one projection that is stored in codes, looked at before they are used; what is wrong is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.errors import UserError
from mindllm.train.checkpoint.tensors import TensorSource

FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Module:
    """A projection of a directory: its tensors by what follows its name."""

    directory: Path
    name: str
    parts: Mapping[str, TensorSource]

    def error(self, part: str, message: str) -> UserError:
        """A mistake in one tensor."""
        source: Any = self.parts.get(part)
        path = getattr(source, "path", self.directory)
        return UserError(f"{path}: {self.name}.{part}: {message}")

    def shape(self, part: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor, which must be there and have so many dimensions."""
        if part not in self.parts:
            raise self.error(part, f"missing; {self.name} is in codes without it")
        shape = tuple(self.parts[part].shape)
        if len(shape) != dimensions or 0 in shape:
            raise self.error(part, f"has shape {list(shape)} instead of {dimensions} dimensions")
        return shape

    def array(self, part: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
        """A tensor, read now, which must have this shape and one of these types."""
        found = self.shape(part, len(shape))
        if found != shape:
            raise self.error(part, f"has shape {list(found)} instead of {list(shape)}")
        dtype = np.dtype(self.parts[part].dtype).name
        if dtype not in dtypes:
            raise self.error(part, f"is of {dtype} instead of {' or '.join(dtypes)}")
        return np.asarray(self.parts[part])

    def floats(self, part: str, shape: tuple[int, ...]) -> np.ndarray:
        """Scales, float32; they must be finite."""
        values = self.array(part, shape, *FLOATS).astype(np.float32)
        if not np.isfinite(values).all():
            raise self.error(part, "has values that are not finite")
        return values


def words(array: np.ndarray) -> np.ndarray:
    """int32 as uint32: shifts bring in zeros."""
    return np.ascontiguousarray(array).view(np.uint32)
