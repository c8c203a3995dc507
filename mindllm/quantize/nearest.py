"""Rounding to the nearest code, group by group: the scale is such that the largest magnitude, or both ends, are codes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mindllm.architecture.quantization import CodeName, bits_of
from mindllm.quantize.codes import Codes
from mindllm.quantize.tables import table_of


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
