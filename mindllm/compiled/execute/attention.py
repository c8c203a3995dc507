"""The fused attention of the accelerator, ``FlashAttentionScore``, and its gradient in numpy.

What it computes is in MindSpore's description of the operator: ``softmax(hide(scale · (q kᵀ + shift))) v``. Arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray

BSH, BNSD, SBH, BSND = 0, 1, 2, 3
"""Values of ``input_layout``; here everything is ``[batch, heads, seq, head_dim]`` (BNSD)."""
WHOLE_MASK, ALL_MASK, CAUSAL, CAUSAL_TO_THE_END, BAND = 0, 1, 2, 3, 4
"""Values of ``sparse_mode``. The last three read a compressed mask."""
COMPRESSED_MASK = (2048, 2048)
SHIFT_ROWS = 1024  # rows of a shift that is given for the last queries alone
STATISTICS = 8  # each row's statistics are repeated that many times


@dataclass(frozen=True)
class Settings:
    """The scalar operands, in the operator's order."""

    heads: int
    keep_probability: float
    scale: float
    before: int
    after: int
    inner_precise: int
    layout: int
    sparse_mode: int

    @classmethod
    def of(cls, values: Sequence[Any]) -> Settings:
        """Refuse what is not computed here."""
        settings = cls(*values)
        if settings.keep_probability != 1.0:
            raise NotImplementedError(f"attention with keep_prob {settings.keep_probability}")
        if settings.layout not in (BSH, BNSD, SBH, BSND):
            raise NotImplementedError(f"attention with input_layout {settings.layout}")
        if settings.sparse_mode not in (WHOLE_MASK, ALL_MASK, CAUSAL, CAUSAL_TO_THE_END, BAND):
            raise NotImplementedError(f"attention with sparse_mode {settings.sparse_mode}")
        return settings


def attention(query: Array, key: Array, value: Array, *options: Any) -> tuple[Array, Array, Array, Array]:
    """``FlashAttentionScore``: largest score and sum of exponentials of each row (repeated), nothing, and the context.

    Args:
        query, key, value: in the layout of the settings; key and value may have fewer heads, value another width.
        options: ``real_shift`` (added to products before they are scaled), two that are unused, the mask (1 = hidden), three that
            are unused, and :class:`Settings`.
    """
    shift, _, _, mask, _, _, _, *rest = options
    settings = Settings.of(rest)
    query, key, value = _heads_first(settings, query, key, value)
    scores, hidden = _scores(query, key, shift, mask, settings)
    largest = scores.max(-1, keepdims=True)
    exponentials = np.where(hidden, np.float32(0), np.exp(scores - largest))
    total = exponentials.sum(-1, keepdims=True)
    context = np.matmul(exponentials / _nonzero(total), _shared(value, query))
    statistics = (np.repeat(largest, STATISTICS, -1), np.repeat(total, STATISTICS, -1))
    return *statistics, np.zeros(1, np.float32), _as_given(settings, context)


def attention_gradient(
    query: Array, key: Array, value: Array, gradient: Array, *options: Any
) -> tuple[Array, Array, Array, Array | None]:
    """``FlashAttentionScoreGrad``: gradients of query, key, value and shift, from the statistics of the forward pass."""
    shift, _, _, mask, largest, total, _, context, _, _, _, *rest = options
    settings = Settings.of(rest)
    query, key, value, gradient, context = _heads_first(settings, query, key, value, gradient, context)
    scores, hidden = _scores(query, key, shift, mask, settings)
    weights = np.where(hidden, np.float32(0), np.exp(scores - largest[..., :1])) / _nonzero(total[..., :1])
    of_weights = np.matmul(gradient, np.swapaxes(_shared(value, query), -1, -2))
    of_scores = weights * (of_weights - np.sum(gradient * context, -1, keepdims=True)) * np.float32(settings.scale)
    of_query = np.matmul(of_scores, _shared(key, query))
    of_key = _unshared(np.matmul(np.swapaxes(of_scores, -1, -2), query), key)
    of_value = _unshared(np.matmul(np.swapaxes(weights, -1, -2), gradient), value)
    found = (_as_given(settings, array) for array in (of_query, of_key, of_value))
    return *found, _of_shift(of_scores, shift)  # type: ignore[return-value]


def hidden_scores(mask: Array | None, settings: Settings, rows: int, columns: int) -> Array:
    """Return a mask of hidden scores, broadcast to ``[batch, heads, rows, columns]``.

    Causal masks begin at the first query and key, or end at the last ones. A band hides the keys more than ``before`` positions
    before a query and those more than ``after`` positions behind it. These are read from the compressed mask, as the kernel
    does: one that is not lower triangular hides something else.
    """
    end = columns - rows
    if settings.sparse_mode == ALL_MASK or (settings.sparse_mode == WHOLE_MASK and mask is None):
        return np.zeros((rows, columns), bool) if mask is None else mask.astype(bool)
    if settings.sparse_mode == WHOLE_MASK:
        assert mask is not None
        distance = np.arange(columns) - np.arange(rows)[:, None]
        return mask.astype(bool) | (distance > settings.after) | (distance < -settings.before)
    if mask is None or mask.shape != COMPRESSED_MASK:
        shape = None if mask is None else list(mask.shape)
        raise NotImplementedError(
            f"attention with sparse_mode {settings.sparse_mode} and a mask of shape {shape}, not {list(COMPRESSED_MASK)}"
        )
    if settings.sparse_mode == CAUSAL:
        return _behind(mask, rows, columns, 0)
    if settings.sparse_mode == CAUSAL_TO_THE_END:
        return _behind(mask, rows, columns, end)
    too_early = ~_behind(mask, rows, columns, end - settings.before - 1)
    return too_early | _behind(mask, rows, columns, end + settings.after)


def _behind(mask: Array, rows: int, columns: int, shift: int) -> Array:
    """``[rows, columns]``: what a compressed mask says of key ``j`` for query ``i + shift``.

    Where it is too small it is read at the nearest place on the same diagonal; off its diagonals, only later keys are hidden.
    """
    row, column = np.meshgrid(np.arange(rows) + shift, np.arange(columns), indexing="ij")
    move = -np.minimum(np.minimum(row, column), 0)
    move -= np.maximum(np.maximum(row, column) + move - (len(mask) - 1), 0)
    inside = (row + move >= 0) & (column + move >= 0) & (np.maximum(row, column) + move < len(mask))
    found = mask[np.where(inside, row + move, 0), np.where(inside, column + move, 0)].astype(bool)
    return np.where(inside, found, column > row)


def _scores(
    query: Array, key: Array, shift: Array | None, mask: Array | None, settings: Settings
) -> tuple[Array, Array]:
    """Scaled scores ``[batch, heads, q, k]``, the smallest number where they are hidden, and which are."""
    products = np.matmul(query, np.swapaxes(_shared(key, query), -1, -2))
    if shift is not None:
        products = products + _unfolded(shift, *products.shape[-2:])
    hidden = hidden_scores(mask, settings, *products.shape[-2:])
    return np.where(hidden, np.finfo(np.float32).min, products * np.float32(settings.scale)), hidden


def _unfolded(shift: Array, rows: int, columns: int) -> Array:
    """Return a shift for every query.

    A shift for the last queries only depends on the distance of a key, and repeats for earlier ones.
    """
    if not _is_folded(shift, rows):
        return shift
    query = np.arange(rows)
    later = query + -(-np.maximum(rows - SHIFT_ROWS - query, 0) // SHIFT_ROWS) * SHIFT_ROWS
    column = np.arange(columns) + (later - query)[:, None]
    found = shift[..., (later - (rows - SHIFT_ROWS))[:, None], np.minimum(column, columns - 1)]
    return np.where(
        column < columns, found, np.float32(0)
    )  # what lies beyond is behind the query, which a causal mask hides


def _is_folded(shift: Array, rows: int) -> bool:
    return rows > SHIFT_ROWS == shift.shape[-2]


def _of_shift(of_scores: Array, shift: Array | None) -> Array | None:
    """Return the gradient of a shift. A shift for the last queries only is a table and has none."""
    if shift is None or _is_folded(shift, of_scores.shape[-2]):
        return None
    axes = tuple(axis for axis in range(of_scores.ndim) if shift.shape[axis] < of_scores.shape[axis])
    return of_scores.sum(axes, keepdims=True)


def _heads_first(settings: Settings, *arrays: Array) -> list[Array]:
    """Return arrays as ``[batch, heads, seq, head_dim]``. The first is the query, whose width gives that of a head."""
    if settings.layout == BNSD:
        return list(arrays)
    if settings.layout == BSND:
        return [array.transpose(0, 2, 1, 3) for array in arrays]
    width = arrays[0].shape[-1] // settings.heads
    split = [array.reshape(*array.shape[:2], -1, width) for array in arrays]
    order = (0, 2, 1, 3) if settings.layout == BSH else (1, 2, 0, 3)
    return [array.transpose(order) for array in split]


def _as_given(settings: Settings, array: Array) -> Array:
    """``[batch, heads, seq, head_dim]`` in the layout of the settings."""
    if settings.layout == BNSD:
        return array
    if settings.layout == BSND:
        return array.transpose(0, 2, 1, 3)
    moved = array.transpose((0, 2, 1, 3) if settings.layout == BSH else (2, 0, 1, 3))
    return moved.reshape(*moved.shape[:2], -1)


def _shared(x: Array, query: Array) -> Array:
    """Key or value heads repeated for the query heads that share them."""
    return np.repeat(x, query.shape[1] // x.shape[1], axis=1)


def _unshared(gradient: Array, x: Array) -> Array:
    """Sum over query heads that share a head of ``x``."""
    batch, heads, *rest = x.shape
    return gradient.reshape(batch, heads, -1, *rest).sum(2)


def _nonzero(total: Array) -> Array:
    """Return divisors without zeros, so that a fully hidden row yields zeros."""
    return np.where(total == 0, np.float32(1), total)
