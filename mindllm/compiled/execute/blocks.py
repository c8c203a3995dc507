"""Whether an array is a part of a whole one: one of the equal blocks it is cut into, or such a block with its rows elsewhere.

Values are compared by content, so no layout has to be known.
"""

from __future__ import annotations

import numpy as np

MOST_TIES = 4
"""Rows on either side of a row, in the order of their fingerprints, that are compared with it element by element."""


def is_block(value: np.ndarray, whole: np.ndarray, tolerance: float) -> bool:
    """Whether ``value`` is one of the equal blocks ``whole`` is cut into along some dimensions; NaN equals NaN."""
    if value.ndim != whole.ndim or any(not n or size % n for size, n in zip(whole.shape, value.shape, strict=True)):
        return False
    if value.dtype == bool or whole.dtype == bool:
        return True
    allowed = _allowed(whole, tolerance)
    corners = whole[tuple(slice(None, None, n) for n in value.shape)]
    first = value[(0,) * value.ndim]
    for index in np.argwhere(np.isclose(corners, first, rtol=0, atol=allowed, equal_nan=True)):
        block = whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, value.shape, strict=True))]
        if np.allclose(value, block, rtol=0, atol=allowed, equal_nan=True):
            return True
    return False


def has_rows(value: np.ndarray, whole: np.ndarray, tolerance: float) -> bool:
    """Whether every row of ``value`` is one of ``whole``, or the same equal part of one, wherever it stands.

    Rows are along the last dimension. So is a sequence that ranks share in another order than that of its tokens, or what went
    from rank to rank, part by part. Rows of one element say nothing, and are none; of sorted tokens, those that nobody wrote are
    not finite and left out.
    """
    if not value.ndim or not whole.ndim or value.dtype == bool or whole.dtype == bool:
        return False
    width, full = value.shape[-1], whole.shape[-1]
    if width < 2 or full % width or not value.size or not whole.size:
        return False
    rows, allowed = value.reshape(-1, width), _allowed(whole, tolerance)
    blocks = whole.reshape(-1, full)
    rows, blocks = (found[np.isfinite(found).all(-1)] for found in (rows, blocks))
    if not len(rows) or not len(blocks):
        return False
    return any(_among(rows, blocks[:, at : at + width], allowed) for at in range(0, full, width))


def _among(rows: np.ndarray, whole: np.ndarray, allowed: float) -> bool:
    weights = np.random.default_rng(0).uniform(0.5, 1.5, whole.shape[1])
    marks = whole @ weights
    order = np.argsort(marks)
    at = np.searchsorted(marks[order], rows @ weights)
    left = np.ones(len(rows), bool)
    for step in range(-MOST_TIES, MOST_TIES):
        near = order[np.clip(at + step, 0, len(order) - 1)]
        left[left] = np.abs(rows[left] - whole[near[left]]).max(-1) > allowed
        if not left.any():
            return True
    return False


def _allowed(whole: np.ndarray, tolerance: float) -> float:
    finite = whole[np.isfinite(whole)]
    return tolerance * float(np.max(np.abs(finite), initial=0.0))
