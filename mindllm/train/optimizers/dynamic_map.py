"""Blockwise dynamic quantization of optimizer state to 8 bits (Dettmers et al., 2022, sections 2.1 and 2.2), in numpy.

A block is so many numbers, 256 there, that follow each other in a tensor. Its scale is its largest magnitude, fp32. A number
over the scale has the code of the nearest of 256 values (dynamic tree quantization, section 1.3): seven decades, in each twice
as many values as in the one below, zero, and one. Of signed values half are negative. These are ``create_dynamic_map`` of
bitsandbytes, without its rule that a first moment which rounds to zero keeps a minus.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np

DECADES = 7
LOWEST = 0.1  # of a decade, whose values are the middles of equal parts between this and one


@dataclass(frozen=True)
class Magnitudes:
    """What is needed to find the nearest of the values that are not negative, which are ``[zero, decades, one]``.

    Attributes:
        values: in rising order, fp32.
        lower: of each the middle between it and the one below, fp32; of the first a number below zero.
        upper: of each the middle between it and the one above; of the last a number above one.
        slopes: by decade, with ``offsets`` the line of numbers in it to their places among the values, before rounding down.
            One is in a decade of its own, which has the line of the one below.
        offsets: by decade.
    """

    values: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    slopes: np.ndarray
    offsets: np.ndarray


@cache
def magnitudes(signed: bool) -> Magnitudes:
    """Those of first moments, which have a sign, or of second moments."""
    counts = [2 ** (decade + (not signed)) for decade in range(DECADES)]
    tops = [10.0 ** (decade - DECADES + 1) for decade in range(DECADES)]
    middles = [top * _middles(count) for top, count in zip(tops, counts, strict=True)]
    values = np.concatenate([[0.0], *middles, [1.0]]).astype(np.float32)
    between = (values[1:] + values[:-1]) / 2
    slopes = np.array([count / (1.0 - LOWEST) / top for top, count in zip(tops, counts, strict=True)])
    firsts = np.array([1, *(1 + total for total in itertools.accumulate(counts[:-1]))])
    offsets = firsts - LOWEST / (1.0 - LOWEST) * np.array(counts)
    return Magnitudes(
        values,
        np.concatenate([[-1.0], between]).astype(np.float32),
        np.concatenate([between, [2.0]]).astype(np.float32),
        np.append(slopes, slopes[-1]).astype(np.float32),
        np.append(offsets, offsets[-1]).astype(np.float32),
    )


def _middles(count: int) -> np.ndarray:
    edges = np.linspace(LOWEST, 1.0, count + 1)
    return (edges[1:] + edges[:-1]) / 2


@cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The value of every code, fp32 ``[256]``, in rising order; minus one has none."""
    values = magnitudes(signed).values
    return np.concatenate([-values[-2:0:-1], values]) if signed else values


def decoded(codes: np.ndarray, scales: np.ndarray, signed: bool) -> np.ndarray:
    """The numbers that ``codes`` (uint8, any shape) stand for, fp32 in their shape; ``scales`` fp32, one for each block."""
    return _scaled(dynamic_map(signed)[codes], scales)


def steps_beside(codes: np.ndarray, scales: np.ndarray, signed: bool) -> np.ndarray:
    """How far the number of each code is from that of the code beside it that is further away, fp32 in the shape of ``codes``."""
    gaps = np.diff(dynamic_map(signed))
    return _scaled(np.maximum(np.append(gaps, 0), np.insert(gaps, 0, 0))[codes], scales)


def encoded(values: np.ndarray, signed: bool, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, uint8 in the shape of ``values``, and the scale of each block of so many numbers, fp32 ``[blocks]``."""
    blocks = values.reshape(-1, block).astype(np.float32)
    scales = np.max(np.abs(blocks), axis=1)
    table = dynamic_map(signed)
    shares = blocks / np.where(scales, scales, 1)[:, None]
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, shares)
    return codes.astype(np.uint8).reshape(values.shape), scales


def _scaled(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (blocks.reshape(scales.size, -1) * scales.reshape(-1, 1)).reshape(blocks.shape)
