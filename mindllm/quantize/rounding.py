"""Three ways of rounding to codes: to the nearest, and two by what a layer meets in a text, GPTQ and AWQ.

The nearest code is found group by group: the scale is such that the largest magnitude, or both ends, are codes.

GPTQ (Frantar et al., 2023): columns are rounded one after the other, and those that are left make up for each error.

What is minimised is ``|W X - Q X|²``, which a matrix of the inputs ``H = X Xᵀ`` says for every row.

AWQ (Lin et al., 2024): columns that meet large inputs are made larger before they are rounded, and the inputs smaller.

The factors are ``mean|x|^a``; of 20 exponents the one with the least ``|W X - Q X|²`` is taken. Then the range of every group is
shrunk where that lowers the same error. ``H``, the sum of ``x xᵀ``, says these errors without the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from mindllm.architecture.quantization import CodeName, bits_of
from mindllm.quantize.codes import Codes
from mindllm.quantize.tables import table_of

BLOCK = 128  # columns whose errors reach the columns behind all of them at once
DAMPING = 0.01  # of the mean of H's diagonal, added to it
EXPONENTS = 20
SHRINKS = tuple(1.0 - step / 20 for step in range(11))  # of the range of a group: 1 to 1/2


def quantize(weight: np.ndarray, code: CodeName, group: int, symmetric: bool = True) -> Codes:
    """``weight`` float32 ``[out, in]`` in codes; ``group`` columns, which must divide ``in``, share a scale.

    ``symmetric``: of codes that are numbers, the one in the middle is zero; otherwise the range reaches from the smallest to the
    largest value of the group.
    """
    out, width = weight.shape
    grouped = np.asarray(weight, np.float32).reshape(out, width // group, group)
    scales, zeros = scales_of(grouped, code, symmetric)
    codes = nearest_codes(grouped, code, scales[:, :, None], None if zeros is None else zeros[:, :, None])
    return Codes.of(code, codes.reshape(out, width), scales, zeros)


def scales_of(grouped: np.ndarray, code: CodeName, symmetric: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
    """Scales and zero points ``[...]`` of groups ``[..., columns]``; scales are numbers of float16, as files hold them."""
    if code not in ("uint4", "uint8"):
        largest = {"int8": 127.0, "e4m3": 448.0}.get(code, 1.0)
        return _as_stored(np.abs(grouped).max(-1) / np.float32(largest)), None
    top = np.float32(2 ** bits_of(code) - 1)
    if symmetric:
        scales = _as_stored(2 * np.abs(grouped).max(-1) / top)
        return scales, np.full(scales.shape, (top + 1) / 2, np.float32)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = _as_stored((high - low) / top)
    return scales, np.clip(np.rint(-low / scales), 0, top).astype(np.float32)


def _as_stored(scales: np.ndarray) -> np.ndarray:
    """Rounded to float16; 1 where nothing is to be scaled, or too little for its numbers."""
    rounded = scales.astype(np.float16).astype(np.float32)
    return np.where(rounded > 0, rounded, np.float32(1))


def nearest_codes(values: np.ndarray, code: CodeName, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """The codes, uint8, nearest to ``values`` under scales and zero points of shapes that spread to theirs."""
    scaled = np.asarray(values, np.float32) / scales
    if zeros is not None:
        return np.clip(np.rint(scaled) + zeros, 0, 2 ** bits_of(code) - 1).astype(np.uint8)
    if code == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    if code == "e4m3":
        return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    table = table_of(code)
    order = np.argsort(table, kind="stable")
    rising = table[order]
    return order.astype(np.uint8)[np.searchsorted((rising[1:] + rising[:-1]) / 2, scaled)]


def gptq(
    weight: np.ndarray,
    inputs: np.ndarray,
    code: CodeName,
    group: int,
    act_order: bool = False,
    symmetric: bool = True,
) -> Codes:
    """``weight`` float32 ``[out, in]`` in codes, with ``inputs`` the sum of ``x xᵀ`` over what it multiplies, ``[in, in]``.

    ``act_order``: columns with the largest inputs come first, and groups are made in that order.
    """
    out, width = weight.shape
    left, hessian = weight.astype(np.float64), inputs.astype(np.float64)
    unused = np.diag(hessian) == 0
    hessian[unused, unused] = 1.0
    left[:, unused] = 0.0
    columns = None
    if act_order:
        columns = np.argsort(-np.diag(hessian), kind="stable").astype(np.int32)
        left, hessian = left[:, columns], hessian[np.ix_(columns, columns)]
    factor = _inverse_factor(hessian)
    codes = np.empty((out, width), np.uint8)
    scales = np.empty((out, width // group), np.float32)
    zeros: np.ndarray | None = None
    start = 0
    while start < width:
        end, which = min(start + BLOCK, (start // group + 1) * group), start // group
        if start % group == 0:
            scales[:, which], middle = scales_of(left[:, start : start + group].astype(np.float32), code, symmetric)
            if middle is not None:
                zeros = np.empty_like(scales) if zeros is None else zeros
                zeros[:, which] = middle
        grid = (scales[:, which], None if zeros is None else zeros[:, which])
        codes[:, start:end], errors = _round_block(left[:, start:end], factor[start:end, start:end], code, *grid)
        left[:, end:] -= errors @ factor[start:end, end:]
        start = end
    return Codes.of(code, codes, scales, zeros, columns)


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """``U``, upper triangle, with ``Uᵀ U`` the inverse of the damped ``hessian``: row ``i`` says what column ``i`` moves."""
    damped = hessian + DAMPING * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    return np.linalg.cholesky(np.linalg.inv(damped)).T


def _round_block(
    block: np.ndarray, factor: np.ndarray, code: CodeName, scales: np.ndarray, zeros: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the columns of ``block``, one by one, and errors that columns behind it make up for, both ``[out, n]``."""
    codes, errors, left = np.empty(block.shape, np.uint8), np.empty_like(block), block.copy()
    table = table_of(code)
    for column in range(block.shape[1]):
        codes[:, column] = nearest_codes(left[:, column], code, scales, zeros)
        value = (table[codes[:, column]] - (0 if zeros is None else zeros)) * scales
        errors[:, column] = (left[:, column] - value) / factor[column, column]
        left[:, column + 1 :] -= np.outer(errors[:, column], factor[column, column + 1 :])
    return codes, errors


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
