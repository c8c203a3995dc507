"""Ascend's operators for sorted tokens of experts in numpy: permutation, products of groups of rows, the way back.

Operands are those of MindSpore's operators, in their order; arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
ALL_ROWS, GROUPS_OF_ROWS, GROUPS_OF_INNER = -1, 0, 2
"""Values of ``group_type``: which dimension the groups are cut from, rows of the result or what is summed over."""


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
    """Refuses rows with places that nobody has; what ``restore_shape`` says behind it matters there only."""
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
