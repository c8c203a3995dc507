"""What stages hold of micro-batches at their fullest moment: what is kept, and the working memory of a backward pass.

The planner and the formula of memory (``mindllm/timing/memory.py``) both ask here, in any unit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mindllm.schedules.orders import Orders, alive_in_backward


def working_memory(layers: Iterable[tuple[float, float]], left: Iterable[float] = ()) -> float:
    """What the backward pass through a place needs at its fullest moment beyond all that its layers keep.

    ``layers`` are in model order: what each keeps, and what it needs for a moment. The pass goes from the last layer to the
    first; when it gets to one, those behind it have freed what they kept, and ``left`` something until it ends.
    """
    most = freed = 0.0
    held = list(layers)
    for (kept, needed), more in zip(reversed(held), reversed(list(left) or [0.0] * len(held)), strict=True):
        most = max(most, needed - freed)
        freed += kept - more
    return max(most, -freed)


def working_memory_of_v(layers: Iterable[tuple[float, float, float]]) -> float:
    """The same in MindSpore's V, whose backward passes free nothing before they end: all that is computed again is there at once.

    ``layers``: what each keeps, what it needs for a moment, and what it would keep if it recomputed nothing. So a micro-batch in
    its backward pass holds all of the latter, and of the rest of what layers need for a moment the most.
    """
    again = rest = 0.0
    for kept, needed, whole in layers:
        again += whole - kept
        rest = max(rest, needed - (whole - kept))
    return again + rest


def held_memory(kept: np.ndarray, working: np.ndarray, orders: Orders) -> np.ndarray:
    """The fullest backward pass of every stage, ``[stages]``.

    ``kept`` of a micro-batch and ``working`` memory of its backward pass are those of every place, ``[chunks, stages]``.
    """
    chunks = len(kept)
    return np.array([
        max(float((vectors @ kept[:, stage]).max()) + working[chunk, stage] for chunk, vectors in enumerate(moments))
        for stage, moments in enumerate(alive_in_backward(orders, chunks))
    ])  # fmt: skip
