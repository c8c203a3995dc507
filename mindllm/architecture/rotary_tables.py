"""Angles of rotary position embedding (Su et al., 2021) with the scalings of Hugging Face's Llama, as numpy arrays.

Channel ``i`` of a head is turned with channel ``i + head_dim / 2``. Models that turn neighbours, or only a part of the
channels, are the same but for the order of the rows of their query and key weights, which their weight tables permute; channels
that are not turned have the frequency 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from mindllm.architecture.parts import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    RotarySpec,
    YarnRopeScaling,
)


def inverse_frequencies(rotary: RotarySpec, head_dim: int, length: int) -> np.ndarray:
    """Return the rotation per position of each channel pair in radians, float64 ``[head_dim / 2]``.

    It is ``theta^(-2i/rotary_dim)`` with the scaling of ``rotary``. ``length`` is the longest sequence, which dynamic scaling
    depends on.
    """
    width, scaling, theta = rotary.rotary_dim, rotary.scaling, rotary.theta
    if isinstance(scaling, DynamicRopeScaling):
        theta *= _dynamic_growth(rotary, scaling, length)
    frequencies = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    if isinstance(scaling, LinearRopeScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3RopeScaling):
        frequencies = _llama3_scaled(frequencies, scaling)
    elif isinstance(scaling, YarnRopeScaling):
        frequencies = _yarn_scaled(frequencies, rotary, scaling)
    return np.concatenate([frequencies, np.zeros((head_dim - width) // 2)])


def _dynamic_growth(rotary: RotarySpec, scaling: DynamicRopeScaling, length: int) -> float:
    """Return the factor on the base, 1 within the original context."""
    original = scaling.original_max_position_embeddings or rotary.max_position
    stretch = scaling.factor * max(length, original) / original - (scaling.factor - 1)
    return stretch ** (rotary.rotary_dim / (rotary.rotary_dim - 2))


def _llama3_scaled(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Return frequencies scaled as in Llama 3.1:

    long wavelengths divided by ``factor``, short ones unchanged, others interpolated.
    """
    original = scaling.original_max_position_embeddings
    turns = original * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn_scaled(frequencies: np.ndarray, rotary: RotarySpec, scaling: YarnRopeScaling) -> np.ndarray:
    """Return frequencies with YaRN's ramp between ``beta_fast`` and ``beta_slow`` turns in the original context."""
    original, width = scaling.original_max_position_embeddings or rotary.max_position, rotary.rotary_dim

    def channel(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low = max(math.floor(channel(scaling.beta_fast)), 0)
    high = min(math.ceil(channel(scaling.beta_slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _magnitude(rotary: RotarySpec) -> float:
    """Return YaRN's factor on both tables, which scales the scores."""
    return rotary.scaling.magnitude if isinstance(rotary.scaling, YarnRopeScaling) else 1.0


def rotary_tables(
    rotary: RotarySpec, head_dim: int, length: int, longest: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of positions ``0 … length - 1``: two float32 arrays ``[length, head_dim]``.

    ``longest`` is the longest sequence that uses them, which dynamic scaling depends on; default ``length``.
    """
    cosines, sines = _half_tables(rotary, head_dim, length, longest or length)
    return np.concatenate([cosines, cosines], axis=-1), np.concatenate([sines, sines], axis=-1)


@lru_cache(maxsize=2)
def _half_tables(rotary: RotarySpec, head_dim: int, length: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the unique columns of both tables. They are cached, because pipeline stages share them."""
    angles = np.outer(np.arange(length, dtype=np.float64), inverse_frequencies(rotary, head_dim, longest))
    turned = np.where(angles[-1:] == 0, 1.0, _magnitude(rotary)) if length > 1 else _magnitude(rotary)
    return (turned * np.cos(angles)).astype(np.float32), (turned * np.sin(angles)).astype(np.float32)
