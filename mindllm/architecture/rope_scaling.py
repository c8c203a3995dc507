"""Ways of stretching rotary positions to longer contexts than a model was trained on, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True)
class DynamicRopeScaling:
    """The base grows with the length of the sequence (NTK-aware scaling; bloc97, 2023)."""

    factor: float
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequencies scaled by wavelength, as in Llama 3.1: low ones are divided by ``factor``, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """Low frequencies interpolated, high ones kept, scores sharpened (YaRN; Peng et al., 2023)."""

    factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    original_max_position_embeddings: int | None = None

    def sharpened(self, share: float = 1.0) -> float:
        """Return ``0.1 · share · ln factor + 1``, by which scores grow with the context."""
        return 0.1 * share * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def magnitude(self) -> float:
        """Factor on both rotary tables."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.sharpened(self.mscale) / self.sharpened(self.mscale_all_dim)
        return self.sharpened()


RopeScaling = LinearRopeScaling | DynamicRopeScaling | Llama3RopeScaling | YarnRopeScaling
