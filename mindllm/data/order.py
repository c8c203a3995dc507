"""Orders drawn from a seed: the one source of chance in this room."""

from __future__ import annotations

import numpy as np

DOCUMENTS, SAMPLES, PACKS = 0, 1, 2  # what an order is for


def permutation(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Returns a permutation of ``count`` (int32 or int64), a function of the numbers given and of nothing else.

    By RandomState, whose numbers numpy freezes, which Generator's are not.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, purpose]
    order = np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
    np.random.RandomState(words).shuffle(order)
    return order
