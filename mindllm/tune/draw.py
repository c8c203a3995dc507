"""Random numbers that are a function of (seed, step, part of the batch, place): dropout of adapters, and noise on embeddings.

A step that is repeated, or resumed, draws the same: back ends' generators have a state that no checkpoint holds. A number is the
product of three random 32-bit factors, of its row, of its column and of the step, of which the high bits are used
(multiplicative hashing; Knuth, The Art of Computer Programming, volume 3, section 6.4).
"""

from __future__ import annotations

import hashlib
import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.models.weights import constant

HALF_RANGE = 2.0**31


def factors(count: int, *key: object) -> np.ndarray:
    """Odd random numbers, int32 ``[count]``, drawn from ``key``."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.integers(-(2**31), 2**31, count, dtype=np.int64).astype(np.int32) | 1


@ms.constexpr
def row_factors(rows: int) -> Tensor:
    """The factors of ``rows`` rows, int32 ``[rows, 1]``."""
    return Tensor(factors(rows, "rows").reshape(-1, 1))


class Draw(nn.Cell):
    """The random state of one step, which all that draws shares: what the engine sets before it runs a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.key = constant("draw.key", np.ones((1, 1), np.int32))
        self.active = constant("draw.active", np.zeros((1, 1), np.float32))

    def begin(self, *key: object) -> None:
        """What follows draws from ``key``."""
        self.key.set_data(Tensor(factors(1, *key).reshape(1, 1)))
        self.active.set_data(Tensor(np.ones((1, 1), np.float32)))

    def end(self) -> None:
        """What follows draws nothing: it evaluates."""
        self.active.set_data(Tensor(np.zeros((1, 1), np.float32)))


class Random(nn.Cell):
    """Rows and ``width`` columns of int32 numbers over the whole range, other ones for each ``name``."""

    def __init__(self, width: int, name: str, draw: Draw) -> None:
        super().__init__(auto_prefix=False)
        self.key = draw.key
        # A parameter: as a constant it would be the first layer's where equal layers share a compiled graph.
        self.columns = constant("columns", factors(width, name).reshape(1, -1))
        self.of_step = P.Mul()
        self.of_row = P.Mul()

    def construct(self, rows: int) -> Tensor:
        return self.of_row(row_factors(rows), self.of_step(self.columns, self.key))


class Dropout(nn.Cell):
    """Sets a ``share`` of ``[tokens, width]`` to zero and scales the rest, so that the mean stays (Srivastava et al., 2014)."""

    def __init__(self, share: float, width: int, name: str, draw: Draw) -> None:
        super().__init__(auto_prefix=False)
        self.random = Random(width, name, draw)
        self.active = draw.active
        self.least = int((2.0 * share - 1.0) * HALF_RANGE)
        self.scale = 1.0 / (1.0 - share)

    def construct(self, x: Tensor) -> Tensor:
        kept = P.cast(self.random(x.shape[0]) >= self.least, ms.float32)
        return x * P.cast(1.0 + self.active * (kept * self.scale - 1.0), x.dtype)


class EmbeddingNoise(nn.Cell):
    """Adds uniform noise of ``± alpha / sqrt(length · width)`` to ``[tokens, width]`` (NEFTune: Jain et al., 2023)."""

    def __init__(self, alpha: float, length: int, width: int, draw: Draw) -> None:
        super().__init__(auto_prefix=False)
        self.random = Random(width, "embeddings", draw)
        self.active = draw.active
        self.strength = alpha / math.sqrt(length * width) / HALF_RANGE

    def construct(self, x: Tensor) -> Tensor:
        noise = P.cast(self.random(x.shape[0]), ms.float32)
        return x + P.cast(noise * (self.active * self.strength), x.dtype)
