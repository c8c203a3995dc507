"""Elementary operators in numpy, one line each: on small arrays a hundred times as fast as a kernel launched by itself.

Operands are those of MindSpore's operators, in their order; every entry is compared with MindSpore's own CPU kernel in the
tests, and ``kernels.choose`` takes that kernel instead where it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mindllm.compiled.execute.references import (
    fast_gelu,
    fast_gelu_gradient,
    gelu_by_tanh,
    gelu_by_tanh_gradient,
    silu,
    silu_gradient,
)

Array = np.ndarray
Kernel = Callable[..., Any]


def matmul(a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
    """Multiply (batches of) matrices, either of them transposed."""
    return np.matmul(np.swapaxes(a, -1, -2) if transpose_a else a, np.swapaxes(b, -1, -2) if transpose_b else b)


def reduced(function: Callable[..., Array]) -> Kernel:
    """Return a reduction with operands ``(x, axes, keep_dims)``. No axes means all axes."""

    def reduce(x: Array, axes: int | tuple[int, ...] | None = (), keep_dims: bool = False, *_: Any) -> Array:
        return function(x, axis=None if axes in ((), None) else axes, keepdims=keep_dims)

    return reduce


def strided_slice(x: Array, begin: tuple, end: tuple, strides: tuple, *masks: int) -> Array:
    """``x[begin:end:strides]`` along the first axes.

    Masks have a bit for each entry of the ranges: of begins and of ends that are left open, of an entry that stands for all
    axes the others leave out (which is not computed here), of entries that add an axis, and of entries that are one place and
    drop their axis.
    """
    open_begin, open_end, rest, added, dropped = (*masks, 0, 0, 0, 0, 0)[:5]
    if rest or (added and dropped):
        raise NotImplementedError(f"StridedSlice with masks {masks}")
    index: list[Any] = []
    for place, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << place
        if added & bit:
            index.append(np.newaxis)
        elif dropped & bit:
            index.append(first)
        else:
            index.append(slice(None if open_begin & bit else first, None if open_end & bit else last, step))
    return x[tuple(index)]


def gather(table: Array, indices: Array, axis: int, batch_dims: int = 0) -> Array:
    """Return slices of ``table`` along ``axis``; zeros for indices outside of it, which a part of a sharded table has.

    The first ``batch_dims`` dimensions of both go together.
    """
    if batch_dims:
        rows = [gather(part, of, axis - 1, batch_dims - 1) for part, of in zip(table, indices, strict=True)]
        return np.stack(rows)
    axis %= table.ndim
    inside = (indices >= 0) & (indices < table.shape[axis])
    found = np.take(table, np.where(inside, indices, 0), axis)
    shape = [1] * axis + list(indices.shape) + [1] * (table.ndim - axis - 1)
    return np.where(inside.reshape(shape), found, np.zeros((), table.dtype))


def one_hot(indices: Array, depth: int, on: Array, off: Array, axis: int = -1) -> Array:
    """``on`` at each index along a new ``axis``, ``off`` elsewhere; a row of ``off`` for an index outside."""
    hot = np.arange(int(depth)) == indices[..., None]
    return np.moveaxis(np.where(hot, on, off), -1, axis)


def unsorted_segment_sum(x: Array, segments: Array, count: int) -> Array:
    """Sums of the slices of ``x`` that share a segment; those of a segment outside are dropped."""
    total = np.zeros((int(count), *x.shape[segments.ndim :]), x.dtype)
    inside = (segments >= 0) & (segments < int(count))
    np.add.at(total, segments[inside], x[inside])
    return total


def split(x: Array, axis: int, parts: int) -> tuple[Array, ...]:
    """Equal parts along ``axis``."""
    return tuple(np.split(x, parts, axis))


def split_with_size(x: Array, sizes: tuple[int, ...], axis: int) -> tuple[Array, ...]:
    """Split into parts of these sizes along ``axis``."""
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


def add_all(arrays: tuple[Array, ...]) -> Array:
    """Their sum, from the first to the last."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


ELEMENTARY: dict[str, Kernel] = {
    "Add": np.add,
    "Sub": np.subtract,
    **dict.fromkeys(("Mul", "Muls"), np.multiply),
    **dict.fromkeys(("Div", "Divs", "RealDiv"), np.true_divide),
    "FloorDiv": np.floor_divide,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Neg": np.negative,
    "Square": np.square,
    "Sqrt": np.sqrt,
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Reciprocal": np.reciprocal,
    "Exp": np.exp,
    "Log": np.log,
    "Equal": np.equal,
    "IsFinite": np.isfinite,
    "SiLU": silu,
    "SiLUGrad": silu_gradient,
    "Tanh": np.tanh,
    "TanhGrad": lambda y, gradient: gradient * (1 - np.square(y)),
    "ReLU": lambda x: np.maximum(x, 0),
    "ReluGrad": lambda gradient, x: np.where(x > 0, gradient, np.zeros((), gradient.dtype)),
    "GeLU": gelu_by_tanh,
    "GeLUGrad": gelu_by_tanh_gradient,
    "FastGeLU": fast_gelu,
    "FastGeLUGrad": fast_gelu_gradient,
    "MatMul": matmul,
    "BatchMatMul": matmul,
    "Reshape": lambda x, shape: x.reshape(shape),
    "Transpose": lambda x, axes: np.transpose(x, axes),
    "ExpandDims": lambda x, axis: np.expand_dims(x, axis),
    "Tile": lambda x, repeats: np.tile(x, repeats),
    "Concat": lambda arrays, axis: np.concatenate(arrays, axis),
    "Split": split,
    "SplitWithSize": split_with_size,
    "StridedSlice": strided_slice,
    "Gather": gather,
    "OneHot": one_hot,
    "UnsortedSegmentSum": unsorted_segment_sum,
    "ReduceSum": reduced(np.sum),
    "SumExt": reduced(np.sum),
    "ReduceMax": reduced(np.max),
    "ReduceMean": reduced(np.mean),
    "AddN": add_all,
    "ZerosLike": np.zeros_like,
    "ZerosLikeExt": lambda x, *_: np.zeros_like(x),
}
"""By MindSpore's name of the operator."""
