"""Round numbers for the axes of pictures: 1, 2, 2.5 or 5 times a power of ten apart, as matplotlib and D3 have them."""

from __future__ import annotations

import math

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def round_ticks(most: float, count: int = 5) -> list[float]:
    """Return the multiples, from 0 to ``most``, of the smallest round step that gives no more than ``count`` of them above 0."""
    if not most > 0 or not math.isfinite(most):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * one for one in STEPS if power * one * count >= most * (1 - 1e-9))
    return [step * number for number in range(int(most / step * (1 + 1e-9)) + 1)]
