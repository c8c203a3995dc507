"""Numbers on their way into JSON, which has no infinite ones and no NaN.

Answers have their names instead, in the spelling of protobuf's JSON, which ``float()`` and JavaScript's ``Number()`` read.
Columns of metrics have null, so that they stay numeric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

SCHEMA = "schema"  # the key of what commands print for programs that tells the version of its other keys


def as_name(number: float) -> str:
    """``NaN``, ``Infinity`` or ``-Infinity``."""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def strict(value: Any, not_finite: Callable[[float], Any] = as_name) -> Any:
    """``value`` as every JSON parser reads it: numpy scalars as Python's, tuples as lists, and ``not_finite`` of a number that is
    infinite or NaN in its place.
    """
    if isinstance(value, Mapping):
        return {key: strict(item, not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, not_finite) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value
