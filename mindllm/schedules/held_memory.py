"""Memory of stages at their fullest moment: kept activations, and the working memory of a backward pass.

The planner and the formula of memory (``mindllm/timing/memory.py``) use it, in any unit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mindllm.schedules.orders import Orders, alive_in_backward


def working_memory(layers: Iterable[tuple[float, float]], residues: Iterable[float] = ()) -> float:
    """Return the memory of the backward pass through a place at its fullest moment, beyond what its layers keep.

    ``layers`` are in model order: kept activations and working memory. The pass goes from the last layer to the first. When it
    reaches a layer, later layers have freed their activations and leave ``residues`` until the pass ends.
    """
    most = freed = 0.0
    needs = list(layers)
    for (activation, needed), more in zip(reversed(needs), reversed(list(residues) or [0.0] * len(needs)), strict=True):
        most = max(most, needed - freed)
        freed += activation - more
    return max(most, -freed)


def v_working_memory(layers: Iterable[tuple[float, float, float]]) -> float:
    """Return the working memory in MindSpore's V, whose backward passes free nothing before they end.

    ``layers`` have kept activations, working memory, and activations without recomputation. So a micro-batch in its backward pass
    holds all of the last, and the largest remaining working memory.
    """
    again = rest = 0.0
    for activation, needed, full in layers:
        again += full - activation
        rest = max(rest, needed - (full - activation))
    return again + rest


def held_memory(activations: np.ndarray, working: np.ndarray, orders: Orders) -> np.ndarray:
    """Return the fullest backward pass of every stage, ``[stages]``.

    ``activations`` of a micro-batch and ``working`` memory of its backward pass are those of every place, ``[chunks, stages]``.
    """
    chunks = len(activations)
    return np.array([
        max(float((vectors @ activations[:, stage]).max()) + working[chunk, stage] for chunk, vectors in enumerate(moments))
        for stage, moments in enumerate(alive_in_backward(orders, chunks))
    ])  # fmt: skip
