"""Fused operators of the accelerator in a few lines of numpy each, for machines that have no kernel for them.

Operands are those of MindSpore's operators, in their order; arithmetic is fp32. Each is compared with PyTorch in the tests.

Among them are Ascend's operators for sorted tokens of experts: permutation, products of groups of rows, the way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from mindllm.compiled.execute.attention import attention, attention_gradient

ALL_ROWS, GROUPS_OF_ROWS, GROUPS_OF_INNER = -1, 0, 2
"""Values of ``group_type``: which dimension the groups are cut from, rows of the result or what is summed over."""
Array = np.ndarray
Kernel = Callable[..., Any]

HALVES, NEIGHBOURS, QUARTERS, NEIGHBOURS_TO_HALVES = 0, 1, 2, 3
"""Modes of RotaryPositionEmbedding: which channels form a pair. The last one also moves the first of all pairs to the front."""

EXACT, BY_TANH = 0, 1
"""Values of ``approximate`` of GeluExt."""
_GELU_SCALE, _GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
_FAST_GELU_SCALE = np.float32(1.702)


def permute(tokens: Array, experts: Array, kept: int | None = None, padded: bool = False) -> tuple[Array, Array]:
    """``MoeTokenPermute``: ``[tokens, hidden]`` and the experts of each token ``[tokens, chosen]`` -> a row for each choice, in
    the order of the experts, then of the tokens; and the row of each choice, int32 ``[tokens · chosen]``.
    """
    if padded or kept not in (None, 0, experts.size):
        raise NotImplementedError(f"MoeTokenPermute of {kept} of {experts.size} choices")
    order = np.argsort(experts.reshape(-1), kind="stable")
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return tokens[order // (experts.size // len(tokens))], places


def permute_gradient(gradient: Array, places: Array, chosen: int = 1, padded: bool = False) -> Array:
    """Gradient of the tokens: the sum over their rows."""
    _check("MoeTokenPermuteGrad", padded)
    return gradient[places].reshape(-1, int(chosen), gradient.shape[1]).sum(1)


def unpermute(rows: Array, places: Array, weights: Array | None = None, padded: bool = False, *_: Any) -> Array:
    """``InnerMoeTokenUnpermute``: the rows of each token, times its weights ``[tokens, chosen]``, added up."""
    _check("MoeTokenUnpermute", padded)
    if weights is None:
        return rows[places]
    of_tokens = rows[places].reshape(*weights.shape, rows.shape[1])
    return (of_tokens * weights[..., None]).sum(1)


def unpermute_gradient(
    rows: Array, gradient: Array, places: Array, weights: Array | None = None, padded: bool = False, *_: Any
) -> tuple[Array, Array | None]:
    """Gradients of rows and weights."""
    _check("MoeTokenUnpermuteGrad", padded)
    of_rows = np.zeros_like(rows)
    if weights is None:
        of_rows[places] = gradient
        return of_rows, None
    of_rows[places] = (weights[..., None] * gradient[:, None]).reshape(-1, rows.shape[1])
    of_tokens = rows[places].reshape(*weights.shape, rows.shape[1])
    return of_rows, (of_tokens * gradient[:, None]).sum(-1)


def _check(operator: str, padded: bool) -> None:
    """Refuse rows with places that nobody has; what ``restore_shape`` says behind it matters there only."""
    if padded:
        raise NotImplementedError(f"{operator} in padded mode")


def grouped_product(rows: tuple[Array, ...], matrices: tuple[Array, ...], *others: Any) -> tuple[Array]:
    """``GroupedMatmul`` of one tensor by one: rows of group ``g``, up to ``ends[g]``, by its matrix; or, where groups are cut
    from what is summed over, ``[m, k]`` by ``[k, n]`` as a matrix for each group.

    The kernel does not write rows behind the last group: here they are not numbers, so that it shows if anybody reads them.
    """
    *ignored, ends, _, group_type, transpose_a, transpose_b = others
    if len(rows) != 1 or transpose_a or transpose_b or group_type == ALL_ROWS or any(x is not None for x in ignored):
        raise NotImplementedError(f"GroupedMatmul of {len(rows)} tensors with group type {group_type}")
    (left,), (right,) = rows, matrices
    cuts = list(zip([0, *ends[:-1]], ends, strict=True))
    if group_type == GROUPS_OF_INNER:
        return (np.stack([left[:, first:last] @ right[first:last] for first, last in cuts]),)
    result = np.full((len(left), right.shape[2]), np.nan, np.float32)
    for (first, last), matrix in zip(cuts, right, strict=True):
        result[first:last] = left[first:last] @ matrix
    return (result,)


GROUPED: dict[str, Callable[..., Any]] = {
    "MoeTokenPermute": permute,
    "MoeTokenPermuteGrad": permute_gradient,
    **dict.fromkeys(("InnerMoeTokenUnpermute", "MoeTokenUnpermute"), unpermute),
    "MoeTokenUnpermuteGrad": unpermute_gradient,
    "GroupedMatmul": grouped_product,
}
"""By MindSpore's name of the operator."""


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """``x / sqrt(mean(x²) + eps) · weight`` over the axes of ``weight`` (Zhang & Sennrich, 2019), and ``1 / sqrt(…)``."""
    axes = tuple(range(x.ndim - weight.ndim, x.ndim))
    reciprocal = 1 / np.sqrt(np.mean(np.square(x), axis=axes, keepdims=True) + np.float32(eps))
    return x * reciprocal * weight, reciprocal


def rms_norm_gradient(gradient: Array, x: Array, reciprocal: Array, weight: Array) -> tuple[Array, Array]:
    """Gradients of ``x`` and ``weight``."""
    axes = tuple(range(x.ndim - weight.ndim, x.ndim))
    normalised, weighted = x * reciprocal, gradient * weight
    mean = np.mean(weighted * normalised, axis=axes, keepdims=True)
    of_weight = np.sum(gradient * normalised, axis=tuple(range(x.ndim - weight.ndim)))
    return reciprocal * (weighted - normalised * mean), of_weight


def silu(x: Array) -> Array:
    """``x · sigmoid(x)``; the sigmoid as a hyperbolic tangent, which does not overflow."""
    return x * _sigmoid(x)


def silu_gradient(gradient: Array, x: Array) -> Array:
    """Gradient of ``x``."""
    sigmoid = _sigmoid(x)
    return gradient * sigmoid * (1 + x * (1 - sigmoid))


def swiglu(x: Array, axis: int = -1) -> Array:
    """``silu(first half) · second half`` along ``axis`` (Shazeer, 2020)."""
    first, second = np.split(x, 2, axis)
    return silu(first) * second


def swiglu_gradient(gradient: Array, x: Array, axis: int = -1) -> Array:
    """Gradient of both halves, joined."""
    first, second = np.split(x, 2, axis)
    return np.concatenate([silu_gradient(gradient * second, first), gradient * silu(first)], axis)


def embedding(indices: Array, table: Array, *_: Any) -> Array:
    """Rows of ``table``; zeros for an index outside of it."""
    inside = (indices >= 0) & (indices < len(table))
    return np.where(inside[..., None], table[np.where(inside, indices, 0)], np.zeros((), table.dtype))


def embedding_gradient(gradient: Array, indices: Array, rows: int, *_: Any) -> Array:
    """Gradient of the table: sums over equal indices."""
    total = np.zeros((int(rows), gradient.shape[-1]), gradient.dtype)
    inside = (indices >= 0) & (indices < int(rows))
    np.add.at(total, indices[inside], gradient[inside])
    return total


def rotary(x: Array, cos: Array, sin: Array, mode: int = HALVES) -> Array:
    """Rotate pairs of channels by the angles of the tables (Su et al., 2021): ``x · cos + half_turned(x) · sin``."""
    return _ordered(x, mode) * cos + _half_turned(x, mode) * sin


def rotary_gradient(
    gradient: Array, cos: Array, sin: Array, x: Array | None = None, mode: int = HALVES
) -> tuple[Array, Array, Array]:
    """Gradient of ``x``, and of the tables where ``x`` is given (zeros where it is not)."""
    of_x = _ordered_back(gradient * cos, mode) + _turned_back(gradient * sin, mode)
    if x is None:
        return of_x, np.zeros_like(cos), np.zeros_like(sin)
    return (
        of_x,
        _summed_to(gradient * _ordered(x, mode), cos.shape),
        _summed_to(gradient * _half_turned(x, mode), sin.shape),
    )


def layer_norm(x: Array, shape: tuple[int, ...], weight: Array, bias: Array, eps: float = 1e-5) -> tuple[Array, ...]:
    """``LayerNormExt``: ``(x - mean) / sqrt(variance + eps) · weight + bias`` over the axes of ``shape`` (Ba et al., 2016),
    the mean, and ``1 / sqrt(…)``.
    """
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean = np.mean(x, axis=axes, keepdims=True)
    reciprocal = 1 / np.sqrt(np.mean(np.square(x - mean), axis=axes, keepdims=True) + np.float32(eps))
    return (x - mean) * reciprocal * weight + bias, mean, reciprocal


def layer_norm_gradient(
    gradient: Array, x: Array, shape: tuple[int, ...], mean: Array, reciprocal: Array, weight: Array, *_: Any
) -> tuple[Array, Array, Array]:
    """Gradients of ``x``, weight and bias."""
    axes, others = tuple(range(x.ndim - len(shape), x.ndim)), tuple(range(x.ndim - len(shape)))
    normalised, weighted = (x - mean) * reciprocal, gradient * weight
    of_x = weighted - np.mean(weighted, axis=axes, keepdims=True)
    of_x = of_x - normalised * np.mean(weighted * normalised, axis=axes, keepdims=True)
    return reciprocal * of_x, np.sum(gradient * normalised, axis=others), np.sum(gradient, axis=others)


def gelu_by_tanh(x: Array) -> Array:
    """Approximate ``x · Φ(x)`` by a hyperbolic tangent (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1 + np.tanh(_GELU_SCALE * (x + _GELU_CUBE * x**3)))


def gelu_by_tanh_gradient(gradient: Array, x: Array, *_: Any) -> Array:
    """Gradient of ``x``."""
    tanh = np.tanh(_GELU_SCALE * (x + _GELU_CUBE * x**3))
    slope = _GELU_SCALE * (1 + 3 * _GELU_CUBE * np.square(x))
    return gradient * 0.5 * (1 + tanh + x * (1 - np.square(tanh)) * slope)


def gelu(x: Array, approximate: int = EXACT) -> Array:
    """``GeluExt``: ``x · Φ(x)`` with the normal distribution, or its approximation."""
    return gelu_by_tanh(x) if approximate == BY_TANH else x * _normal_distribution(x)


def gelu_gradient(gradient: Array, x: Array, approximate: int = EXACT) -> Array:
    """Gradient of ``x``."""
    if approximate == BY_TANH:
        return gelu_by_tanh_gradient(gradient, x)
    density = np.exp(-0.5 * np.square(x)) * np.float32(1 / math.sqrt(2 * math.pi))
    return gradient * (_normal_distribution(x) + x * density)


def fast_gelu(x: Array) -> Array:
    """``x · sigmoid(1.702 x)`` (Hendrycks & Gimpel, 2016)."""
    return x * _sigmoid(_FAST_GELU_SCALE * x)


def fast_gelu_gradient(gradient: Array, x: Array) -> Array:
    """Gradient of ``x``."""
    sigmoid = _sigmoid(_FAST_GELU_SCALE * x)
    return gradient * sigmoid * (1 + _FAST_GELU_SCALE * x * (1 - sigmoid))


def sorted_values(x: Array, axis: int = -1, descending: bool = False, stable: bool = False) -> tuple[Array, Array]:
    """``SortExt``: values in order along ``axis``, and where they were. Equal ones stay in their order."""
    order = np.argsort(-x if descending else x, axis=axis, kind="stable")
    return np.take_along_axis(x, order, axis), order


def largest_values(
    x: Array, count: int, axis: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[Array, Array]:
    """``TopkExt``: the first ``count`` values in order along ``axis``, the largest or the smallest, and where they were."""
    values, order = sorted_values(x, axis, descending=largest)
    first = np.arange(int(count))
    return np.take(values, first, axis), np.take(order, first, axis)


def slice_along(x: Array, axis: int, start: int, end: int, step: int) -> Array:
    """``SliceExt``: ``x[start:end:step]`` along ``axis``."""
    return x[(slice(None),) * (axis % x.ndim) + (slice(start, end, step),)]


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _normal_distribution(x: Array) -> Array:
    return 0.5 * (1 + special.erf(x / np.float32(math.sqrt(2))))


def _ordered(x: Array, mode: int) -> Array:
    """Return the channels in the order of the result."""
    return np.concatenate([x[..., ::2], x[..., 1::2]], -1) if mode == NEIGHBOURS_TO_HALVES else x


def _ordered_back(gradient: Array, mode: int) -> Array:
    if mode != NEIGHBOURS_TO_HALVES:
        return gradient
    first, second = np.split(gradient, 2, -1)
    return np.stack([first, second], -1).reshape(gradient.shape)


def _half_turned(x: Array, mode: int) -> Array:
    """Every pair ``(a, b)`` as ``(-b, a)``, in the order of the result."""
    if mode == NEIGHBOURS_TO_HALVES:
        return _half_turned(_ordered(x, mode), HALVES)
    if mode == HALVES:
        first, second = np.split(x, 2, -1)
        return np.concatenate([-second, first], -1)
    if mode == QUARTERS:
        return np.concatenate([_half_turned(half, HALVES) for half in np.split(x, 2, -1)], -1)
    if mode == NEIGHBOURS:
        return np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    raise NotImplementedError(f"rotary position embedding with mode {mode}")


def _turned_back(gradient: Array, mode: int) -> Array:
    """Return the transpose of :func:`_half_turned`: a half turn in the other direction."""
    if mode == NEIGHBOURS_TO_HALVES:
        return _ordered_back(-_half_turned(gradient, HALVES), mode)
    return -_half_turned(gradient, mode)


def _summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that broadcasting added or stretched."""
    axes = tuple(
        axis
        for axis in range(x.ndim)
        if axis < x.ndim - len(shape) or shape[axis - x.ndim + len(shape)] < x.shape[axis]
    )
    return x.sum(axes, keepdims=True).reshape(shape)


REFERENCES: dict[str, Kernel] = {
    "RmsNorm": rms_norm,
    "RmsNormGrad": rms_norm_gradient,
    "Swiglu": swiglu,
    "SwigluGrad": swiglu_gradient,
    "RotaryPositionEmbedding": rotary,
    "RotaryPositionEmbeddingGrad": rotary_gradient,
    "LayerNormExt": layer_norm,
    "LayerNormGradExt": layer_norm_gradient,
    "GeluExt": gelu,
    "GeluGradExt": gelu_gradient,
    "Embedding": embedding,
    "EmbeddingDenseBackward": embedding_gradient,
    "Outer": np.outer,
    "ReduceAll": lambda x, axes=None, keep_dims=False: np.all(x, axis=axes or None, keepdims=keep_dims),
    **dict.fromkeys(("NPUGetFloatStatusV2", "NPUClearFloatStatusV2"), lambda status, *_: np.zeros_like(status)),
    "SortExt": sorted_values,
    "TopkExt": largest_values,
    "SliceExt": slice_along,
    "CumsumExt": lambda x, axis, *_: np.cumsum(x, axis),
    "SplitTensor": lambda x, size, axis=0: tuple(np.split(x, range(size, x.shape[axis], size), axis)),
    "Copy": np.array,
    "InplaceZero": np.zeros_like,
    "FlashAttentionScore": attention,
    "FlashAttentionScoreGrad": attention_gradient,
    "TransposeExtView": lambda x, first, second: np.swapaxes(x, first, second),
    **GROUPED,
}
"""By MindSpore's name of the operator."""
