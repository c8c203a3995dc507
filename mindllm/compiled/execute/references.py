"""Fused operators of the accelerator in a few lines of numpy each, for machines that have no kernel for them.

Operands are those of MindSpore's operators, in their order; arithmetic is fp32. Each is compared with PyTorch in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
Kernel = Callable[..., Any]

BNSD = 1  # value of FlashAttentionScore's input_layout: [batch, heads, seq, head_dim]
HALVES, NEIGHBOURS = 0, 1  # modes of RotaryPositionEmbedding: which channels form a pair
STATISTICS = 8  # FlashAttentionScore repeats each row's statistics that many times
WHOLE_MASK, ALL_MASK, CAUSAL, CAUSAL_TO_THE_END, BAND = 0, 1, 2, 3, 4  # values of sparse_mode


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


def rotary(x: Array, cos: Array, sin: Array, mode: int = HALVES) -> Array:
    """Pairs of channels turned by the angles of the tables (Su et al., 2021): ``x · cos + half_turned(x) · sin``."""
    return x * cos + _half_turned(x, mode) * sin


def rotary_gradient(
    gradient: Array, cos: Array, sin: Array, x: Array | None = None, mode: int = HALVES
) -> tuple[Array, Array, Array]:
    """Gradient of ``x``, and of the tables where ``x`` is given (zeros where it is not)."""
    of_x = gradient * cos - _half_turned(gradient * sin, mode)
    if x is None:
        return of_x, np.zeros_like(cos), np.zeros_like(sin)
    return of_x, _summed_to(gradient * x, cos.shape), _summed_to(gradient * _half_turned(x, mode), sin.shape)


def attention(query: Array, key: Array, value: Array, *options: Any) -> tuple[Array, Array, Array, Array]:
    """``FlashAttentionScore``: largest score and sum of exponentials of each row (repeated), nothing, and the context.

    Query ``[batch, heads, q, d]``, key and value ``[batch, kv_heads, k, d]``. The remaining operands are those of the
    operator: five unused ones around the mask (uint8, 1 = masked), and its settings.
    """
    _, _, _, mask, _, _, _, *settings = options
    scores, _ = _scores(query, key, mask, settings)
    largest = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - largest)
    total = exponentials.sum(-1, keepdims=True)
    context = np.matmul(exponentials / total, _shared(value, query))
    return np.repeat(largest, STATISTICS, -1), np.repeat(total, STATISTICS, -1), np.zeros(1, np.float32), context


def attention_gradient(
    query: Array, key: Array, value: Array, gradient: Array, *options: Any
) -> tuple[Array, Array, Array, None]:
    """``FlashAttentionScoreGrad``: gradients of query, key and value, from the statistics of the forward pass."""
    _, _, _, mask, largest, total, _, context, _, _, _, *settings = options
    scores, scale = _scores(query, key, mask, settings)
    weights = np.exp(scores - largest[..., :1]) / total[..., :1]
    of_weights = np.matmul(gradient, np.swapaxes(_shared(value, query), -1, -2))
    of_scores = weights * (of_weights - np.sum(gradient * context, -1, keepdims=True)) * scale
    of_query = np.matmul(of_scores, _shared(key, query))
    of_key = np.matmul(np.swapaxes(of_scores, -1, -2), query)
    of_value = np.matmul(np.swapaxes(weights, -1, -2), gradient)
    return of_query, _unshared(of_key, key), _unshared(of_value, value), None


def _scores(query: Array, key: Array, mask: Array | None, settings: list[Any]) -> tuple[Array, np.float32]:
    """Scaled and masked scores ``[batch, heads, q, k]``, and the scale."""
    _, keep_probability, scale, before, after, _, layout, sparse_mode = settings
    if layout != BNSD or keep_probability != 1.0:
        raise NotImplementedError(f"attention with input_layout {layout} and keep_prob {keep_probability}")
    scale = np.float32(scale)
    scores = np.matmul(query, np.swapaxes(_shared(key, query), -1, -2)) * scale
    rows, columns = scores.shape[-2:]
    hidden = (
        _outside_band(rows, columns, before, after)
        if sparse_mode == BAND
        else _hidden(mask, sparse_mode, rows, columns)
    )
    return np.where(hidden, np.finfo(np.float32).min, scores), scale


def _hidden(mask: Array | None, sparse_mode: int, rows: int, columns: int) -> Array:
    """Which scores are masked, broadcast to ``[batch, heads, rows, columns]``. A compressed mask means a causal one."""
    if sparse_mode in (WHOLE_MASK, ALL_MASK):
        return np.zeros((rows, columns), bool) if mask is None else mask.astype(bool)
    if sparse_mode in (CAUSAL, CAUSAL_TO_THE_END):
        return np.triu(np.ones((rows, columns), bool), 1 + (columns - rows if sparse_mode == CAUSAL_TO_THE_END else 0))
    raise NotImplementedError(f"attention with sparse_mode {sparse_mode}")


def _outside_band(rows: int, columns: int, before: int, after: int) -> Array:
    """Which keys are more than ``before`` before their query or more than ``after`` behind it; the last of both are level."""
    distance = np.arange(rows)[:, None] + (columns - rows) - np.arange(columns)
    return (distance > before) | (distance < -after)


def _shared(x: Array, query: Array) -> Array:
    """Key or value heads repeated for the query heads that share them."""
    return np.repeat(x, query.shape[1] // x.shape[1], axis=1)


def _unshared(gradient: Array, x: Array) -> Array:
    """Sum over query heads that share a head of ``x``."""
    batch, heads, *rest = x.shape
    return gradient.reshape(batch, heads, -1, *rest).sum(2)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _half_turned(x: Array, mode: int) -> Array:
    if mode == HALVES:
        first, second = np.split(x, 2, -1)
        return np.concatenate([-second, first], -1)
    if mode == NEIGHBOURS:
        return np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    raise NotImplementedError(f"rotary position embedding with mode {mode}")


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
    "FlashAttentionScore": attention,
    "FlashAttentionScoreGrad": attention_gradient,
}
"""By MindSpore's name of the operator."""
