"""AWQ (Lin et al., 2024): columns that meet large inputs are made larger before they are rounded, and the inputs smaller.

The factors are ``mean|x|^a``; of 20 exponents the one with the least ``|W X - Q X|²`` is taken. Then the range of every group is
shrunk where that lowers the same error. ``H``, the sum of ``x xᵀ``, says these errors without the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindllm.architecture.quantization import CodeName
from mindllm.quantize.codes import Codes
from mindllm.quantize.nearest import nearest_codes, quantize, scales_of

EXPONENTS = 20
SHRINKS = tuple(1.0 - step / 20 for step in range(11))  # of the range of a group: 1 to 1/2


def output_error(weight: np.ndarray, rounded: np.ndarray, inputs: np.ndarray) -> float:
    """``|W X - Q X|²`` of two matrices ``[out, in]`` with ``inputs`` ``[in, in]``, the sum of ``x xᵀ``."""
    error = (rounded - weight).astype(np.float64)
    return float(np.sum((error @ inputs) * error))


def channel_factors(
    weights: Sequence[np.ndarray], inputs: np.ndarray, magnitudes: np.ndarray, code: CodeName, group: int
) -> np.ndarray:
    """What columns are multiplied by, float32 ``[in]``, of all matrices that share their inputs.

    ``magnitudes`` ``[in]`` are means of ``|x|``. The first exponent is 0, which changes nothing: it never gets worse.
    """
    best, least = np.ones(len(magnitudes), np.float32), np.inf
    for step in range(EXPONENTS):
        factors = np.maximum(magnitudes, 1e-4) ** (step / EXPONENTS)
        factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
        error = sum(
            output_error(weight, quantize(weight * factors, code, group, symmetric=False).values() / factors, inputs)
            for weight in weights
        )
        if error < least:
            best, least = factors, error
    return best


def clipped(weight: np.ndarray, inputs: np.ndarray, code: CodeName, group: int) -> Codes:
    """``weight`` in codes; every group of every row has the range with the least error of what it adds to the output."""
    out, width = weight.shape
    grouped = weight.reshape(out, -1, group).astype(np.float32)
    index = np.arange(width).reshape(-1, group)
    own = inputs[index[:, :, None], index[:, None, :]]  # [groups, group, group]
    least = np.full(grouped.shape[:2], np.inf)
    scales, zeros = np.empty((2, *grouped.shape[:2]), np.float32)
    for shrink in SHRINKS:
        found, middle = scales_of(grouped * np.float32(shrink), code, symmetric=False)
        assert middle is not None
        codes = nearest_codes(grouped, code, found[:, :, None], middle[:, :, None])
        error = (codes - middle[:, :, None]) * found[:, :, None] - grouped
        cost = np.einsum("ogi,gij,ogj->og", error, own, error, optimize=True)
        better = cost < least
        least[better], scales[better], zeros[better] = cost[better], found[better], middle[better]
    codes = nearest_codes(grouped, code, scales[:, :, None], zeros[:, :, None])
    return Codes.of(code, codes.reshape(out, width), scales, zeros)
