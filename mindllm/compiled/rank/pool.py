"""What the graphs of many ranks have in common, kept once: ranks of a stage differ in little but rank numbers and groups."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

SMALL = (str, int, float, bool)
Value = TypeVar("Value", bound=Hashable)


class Pool:
    """Equal values become the same object. Whoever reads graphs with one pool must not change what they hold."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def same(self, value: Value) -> Value:
        """Return the first value that is equal and of the same type. Inside a tuple 1 and True are equal: see ``plain``."""
        return self._values.setdefault((type(value), value), value)

    def plain(self, value: Any) -> Any:
        """Return the first value with the same text, for numbers, texts, tuples and mappings; else the value itself."""
        return self._values.setdefault((Mapping, repr(value)), value) if _is_plain(value) else value

    def attributes(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return attributes with shared names and values."""
        return {self.same(name): self.plain(value) for name, value in values.items()}

    def array(self, array: np.ndarray) -> np.ndarray:
        """Return the first array with this content."""
        content = hashlib.sha256(np.ascontiguousarray(array).data).digest()
        return self._values.setdefault((array.dtype.str, array.shape, content), array)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, SMALL)
