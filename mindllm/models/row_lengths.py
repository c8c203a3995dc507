"""Lengths of the rows of a weight: what DoRA trains beside their directions (Liu et al., 2024)."""

from __future__ import annotations

import numpy as np


def row_lengths(weight: np.ndarray) -> np.ndarray:
    """Euclidean length of every row of ``[out, in]``, fp32 ``[out]``."""
    return np.sqrt(np.square(weight, dtype=np.float64).sum(axis=1)).astype(np.float32)
