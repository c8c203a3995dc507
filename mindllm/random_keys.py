"""Random numbers that samples bring along: what a compiled step draws is a function of (seed, sample, position)."""

from __future__ import annotations

import numpy as np

RANDOM_KEYS = "random_keys"


def random_keys(seed: int, sample: int, length: int) -> np.ndarray:
    """Odd int32 numbers ``[length]``, one for every token of sample ``sample`` of a run (Philox; Salmon et al., 2011)."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=sample << 64))
    return generator.integers(-(2**31), 2**31, length, dtype=np.int32) | np.int32(1)
