"""In which order tokens stand where devices share a sequence in balanced halves (as in Megatron-LM and zigzag ring attention).

Under a causal mask a device with the last piece of a sequence computes most of the scores, one with the first piece nearly none.
So a device takes a piece from the beginning and, counted from the end, the same piece.
"""

from __future__ import annotations

import numpy as np


def balanced_order(length: int, ranks: int) -> np.ndarray:
    """Positions of tokens as they stand, int32 ``[length]``: for every rank its early piece, then its late one in reverse."""
    pieces = np.arange(length, dtype=np.int32).reshape(2 * ranks, -1)
    return np.concatenate([part for rank in range(ranks) for part in (pieces[rank], pieces[-1 - rank][::-1])])
