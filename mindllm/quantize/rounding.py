"""Rounding to codes: to the nearest ones, or calibrated with inputs by GPTQ or AWQ.

Nearest: the scale of each group makes its largest magnitude, or both ends of its range, codes.

GPTQ (Frantar et al., 2023): columns are rounded one after another, and the remaining ones compensate for each error. It minimizes
``|W X - Q X|²``, which follows from the inputs' matrix ``H = X Xᵀ``.

AWQ (Lin et al., 2024): columns with large inputs are scaled up before rounding, and the inputs down. The factors are
``mean|x|^a``, with the best of 20 exponents. Then the range of each group is shrunk where that reduces the error.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from mindllm.architecture.quantization import COLUMNS, CodeName, CodeSpec, bits_of
from mindllm.quantize.codes import Codes, code_values

BLOCK = 128  # columns whose errors are applied to later columns together
DAMPING = 0.01  # fraction of the mean of H's diagonal that is added to it
EXPONENTS = 20
SHRINKS = tuple(1.0 - step / 20 for step in range(11))  # factors of a group's range, 1 to 1/2


def quantize(weight: np.ndarray, code: CodeName, group: int, symmetric: bool = True) -> Codes:
    """Round ``weight`` float32 ``[out, in]`` to the nearest codes. ``group`` columns, which must divide ``in``, share a scale.

    Arguments:
        symmetric: the middle one of unsigned codes is zero. Otherwise the range is that of the group's values.
    """
    out, width = weight.shape
    grouped = np.asarray(weight, np.float32).reshape(out, width // group, group)
    scales, zeros = group_scales(grouped, code, symmetric)
    codes = nearest_codes(grouped, code, scales[:, :, None], None if zeros is None else zeros[:, :, None])
    return Codes.from_unpacked(code, codes.reshape(out, width), scales, zeros)


def round_tensors(weight: np.ndarray, spec: CodeSpec) -> dict[str, np.ndarray]:
    """Round a weight ``[out, in]`` and return the tensors of ``DequantizedWeight``."""
    tensors = quantize(weight, spec.code, spec.group).tensors()
    return {**tensors, **({COLUMNS: np.arange(spec.in_features, dtype=np.int32)} if spec.ordered else {})}


def group_scales(grouped: np.ndarray, code: CodeName, symmetric: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
    """Return scales and zero points ``[...]`` of groups ``[..., columns]``. Scales are float16 values, as in files."""
    if code not in ("uint4", "uint8"):
        largest = {"int8": 127.0, "e4m3": 448.0}.get(code, 1.0)
        return _round_scales(np.abs(grouped).max(-1) / np.float32(largest)), None
    top = np.float32(2 ** bits_of(code) - 1)
    if symmetric:
        scales = _round_scales(2 * np.abs(grouped).max(-1) / top)
        return scales, np.full(scales.shape, (top + 1) / 2, np.float32)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = _round_scales((high - low) / top)
    return scales, np.clip(np.rint(-low / scales), 0, top).astype(np.float32)


def _round_scales(scales: np.ndarray) -> np.ndarray:
    """Round to float16. Zeros and values below its range become 1."""
    rounded = scales.astype(np.float16).astype(np.float32)
    return np.where(rounded > 0, rounded, np.float32(1))


def nearest_codes(values: np.ndarray, code: CodeName, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """Return the codes, uint8, nearest to ``values``. Scales and zero points are broadcast."""
    scaled = np.asarray(values, np.float32) / scales
    if zeros is not None:
        return np.clip(np.rint(scaled) + zeros, 0, 2 ** bits_of(code) - 1).astype(np.uint8)
    if code == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    if code == "e4m3":
        return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    table = code_values(code)
    order = np.argsort(table, kind="stable")
    rising = table[order]
    return order.astype(np.uint8)[np.searchsorted((rising[1:] + rising[:-1]) / 2, scaled)]


def quantize_gptq(
    weight: np.ndarray,
    inputs: np.ndarray,
    code: CodeName,
    group: int,
    act_order: bool = False,
    symmetric: bool = True,
) -> Codes:
    """Round ``weight`` float32 ``[out, in]`` by GPTQ.

    Arguments:
        inputs: the sum of ``x xᵀ`` over its inputs, ``[in, in]``.
        act_order: round the columns with the largest inputs first, and form groups in that order.
    """
    out, width = weight.shape
    remaining, hessian = weight.astype(np.float64), inputs.astype(np.float64)
    unused = np.diag(hessian) == 0
    hessian[unused, unused] = 1.0
    remaining[:, unused] = 0.0
    columns = None
    if act_order:
        columns = np.argsort(-np.diag(hessian), kind="stable").astype(np.int32)
        remaining, hessian = remaining[:, columns], hessian[np.ix_(columns, columns)]
    # U, upper triangular, with Uᵀ U the inverse of the damped matrix: row i has the effect of column i on later columns.
    damped = hessian + DAMPING * np.mean(np.diag(hessian)) * np.eye(width)
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    codes = np.empty((out, width), np.uint8)
    scales = np.empty((out, width // group), np.float32)
    zeros: np.ndarray | None = None
    start = 0
    while start < width:
        end, index = min(start + BLOCK, (start // group + 1) * group), start // group
        if start % group == 0:
            scales[:, index], middle = group_scales(
                remaining[:, start : start + group].astype(np.float32), code, symmetric
            )
            if middle is not None:
                zeros = np.empty_like(scales) if zeros is None else zeros
                zeros[:, index] = middle
        grid = (scales[:, index], None if zeros is None else zeros[:, index])
        codes[:, start:end], errors = _round_block(remaining[:, start:end], factor[start:end, start:end], code, *grid)
        remaining[:, end:] -= errors @ factor[start:end, end:]
        start = end
    return Codes.from_unpacked(code, codes, scales, zeros, columns)


def _round_block(
    block: np.ndarray, factor: np.ndarray, code: CodeName, scales: np.ndarray, zeros: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Round the columns of ``block`` one by one; return codes and the errors for later columns, both ``[out, n]``."""
    codes, errors, remaining = np.empty(block.shape, np.uint8), np.empty_like(block), block.copy()
    table = code_values(code)
    for column in range(block.shape[1]):
        codes[:, column] = nearest_codes(remaining[:, column], code, scales, zeros)
        value = (table[codes[:, column]] - (0 if zeros is None else zeros)) * scales
        errors[:, column] = (remaining[:, column] - value) / factor[column, column]
        remaining[:, column + 1 :] -= np.outer(errors[:, column], factor[column, column + 1 :])
    return codes, errors


def output_error(weight: np.ndarray, rounded: np.ndarray, inputs: np.ndarray) -> float:
    """Return ``|W X - Q X|²`` of two matrices ``[out, in]``. ``inputs`` ``[in, in]`` is the sum of ``x xᵀ``."""
    error = (rounded - weight).astype(np.float64)
    return float(np.sum((error @ inputs) * error))


def channel_factors(
    weights: Sequence[np.ndarray], inputs: np.ndarray, magnitudes: np.ndarray, code: CodeName, group: int
) -> np.ndarray:
    """Return AWQ's factors of columns, float32 ``[in]``, for all matrices that share an input.

    ``magnitudes`` ``[in]`` are means of ``|x|``. The first exponent, 0, changes nothing, so the error never increases.
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


def quantize_clipped(weight: np.ndarray, inputs: np.ndarray, code: CodeName, group: int) -> Codes:
    """Round ``weight``. Each group of each row has the range with the least error of its contribution to the output."""
    out, width = weight.shape
    grouped = weight.reshape(out, -1, group).astype(np.float32)
    index = np.arange(width).reshape(-1, group)
    group_inputs = inputs[index[:, :, None], index[:, None, :]]  # [groups, group, group]
    least = np.full(grouped.shape[:2], np.inf)
    scales, zeros = np.empty((2, *grouped.shape[:2]), np.float32)
    for shrink in SHRINKS:
        candidate, middle = group_scales(grouped * np.float32(shrink), code, symmetric=False)
        assert middle is not None
        codes = nearest_codes(grouped, code, candidate[:, :, None], middle[:, :, None])
        error = (codes - middle[:, :, None]) * candidate[:, :, None] - grouped
        cost = np.einsum("ogi,gij,ogj->og", error, group_inputs, error, optimize=True)
        better = cost < least
        least[better], scales[better], zeros[better] = cost[better], candidate[better], middle[better]
    codes = nearest_codes(grouped, code, scales[:, :, None], zeros[:, :, None])
    return Codes.from_unpacked(code, codes.reshape(out, width), scales, zeros)
