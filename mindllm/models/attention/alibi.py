"""Attention with linear biases (Press et al., 2022): every head adds its slope times the position of the key to its scores.

A query's own position would add the same to all its scores, which the softmax does not see, so a row per head is enough.
"""

from __future__ import annotations

import math

import numpy as np


def alibi_slopes(heads: int) -> np.ndarray:
    """Return float64 ``[heads]``: a geometric sequence from ``2^(-8/heads)``.

    If ``heads`` is not a power of two, it is the sequence of the power below, then every second number of the power above
    (the paper's reference code).
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([slopes, between])


def alibi_bias(heads: int, length: int) -> np.ndarray:
    """Return the bias added to the scores of keys ``0 … length - 1``: float32 ``[1, heads, 1, length]``."""
    bias = alibi_slopes(heads)[:, None] * np.arange(length)
    return bias.astype(np.float32)[None, :, None, :]
