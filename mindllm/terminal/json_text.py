"""Numbers for JSON, which has no infinity and no NaN.

Results have names instead, in the spelling of protobuf's JSON, which ``float()`` and JavaScript's ``Number()`` parse. Metrics
have null, so that their columns stay numeric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

SCHEMA = "schema"  # key of JSON output with the version of the other keys


def number_name(number: float) -> str:
    """Return ``NaN``, ``Infinity`` or ``-Infinity``."""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def strict(value: Any, not_finite: Callable[[float], Any] = number_name) -> Any:
    """Return a value that every JSON parser reads: Python numbers, lists, and ``not_finite`` of infinite numbers and NaN."""
    if isinstance(value, Mapping):
        return {key: strict(item, not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, not_finite) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value
