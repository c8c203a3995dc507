"""Health figures of a step per group of layers, from the sums of squares that compiled cells return (``watched``).

Every part of a weight is counted once, on the first rank that has it, so figures equal those of a single device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from mindllm.config import RunConfig
from mindllm.config.callbacks import GRADIENT, LOGIT, UPDATE, WEIGHT
from mindllm.train.job.ranks import Ranks

Watched = Mapping[str, Mapping[str, float]]
"""By figure and weight: the sum of squares over the whole weight, float64. By layer: the largest attention logit."""
LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)")
ATTENTION, FEED_FORWARD, NORMS, HEAD, EMBEDDING = "attention", "feed_forward", "norms", "head", "embedding"


def sums_by_weight(kinds: Sequence[str], names: Sequence[str], sums: np.ndarray) -> dict[str, dict[str, float]]:
    """Return ``sums`` ``[kinds, weights]`` as nested dictionaries."""
    return {kind: dict(zip(names, map(float, row), strict=True)) for kind, row in zip(kinds, sums, strict=True)}


def max_over_ranks(logits: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Return the largest logit per layer over all ranks; each rank has those of its own layers and tokens. Collective."""
    if ranks.count == 1:
        return dict(logits)
    layers = max(map(int, logits), default=-1) + 1
    layers = max(map(int, ranks.gather(float(layers))))
    columns = [ranks.gather(logits.get(str(layer), math.nan)) for layer in range(layers)]
    known = {str(layer): [value for value in column if not math.isnan(value)] for layer, column in enumerate(columns)}
    return {layer: max(values) for layer, values in known.items() if values}


def group_of(weight: str, layers_per_group: int = 1) -> str:
    """Return the group of a weight: `embedding`, `head` (includes the last norm), or a part of layers: `layers_0.attention`.

    With several layers per group: `layers_0-3.attention`.
    """
    match = LAYER.match(weight)
    if match is None:
        return EMBEDDING if "embedding" in weight else HEAD
    number, part = int(match[1]), match[2]
    first = number - number % layers_per_group
    layers = f"{first}" if layers_per_group == 1 else f"{first}-{first + layers_per_group - 1}"
    return f"layers_{layers}.{part if part in (ATTENTION, FEED_FORWARD) else NORMS if 'norm' in part else part}"


def health_figures(watched: Watched, norm: float, applied: bool, config: RunConfig) -> dict[str, float]:
    """Return the figures of a step by ``figure/group``. A step that was not applied has no update figures.

    Args:
        watched: sums over the whole model.
        norm: global norm of the gradients. It determines the loss scale contained in the sums.
        applied: whether the step changed the weights.
        config: the run.
    """
    size, requested = config.monitor_config.layers_per_group, config.monitor_config.watched()
    grouped = {kind: _grouped(sums, size) for kind, sums in watched.items() if kind != LOGIT}
    squares = grouped.get(GRADIENT, {})
    whole = _root(sum(squares.values()))
    unscale = norm / whole if whole else 0.0
    figures = {f"{GRADIENT}/{group}": _root(total) * unscale for group, total in squares.items()}
    if WEIGHT in requested:
        figures |= {f"{WEIGHT}/{group}": _root(total) for group, total in grouped.get(WEIGHT, {}).items()}
    if applied:
        weights = grouped.get(WEIGHT, {})
        # The relative update of weights that are all zero is undefined.
        for group, total in grouped.get(UPDATE, {}).items():
            if weights[group]:
                figures[f"{UPDATE}/{group}"] = _root(total / weights[group])
    return figures | {f"{LOGIT}/layer_{layer}": logit for layer, logit in watched.get(LOGIT, {}).items()}


def _grouped(sums: Mapping[str, float], layers_per_group: int) -> dict[str, float]:
    totals: dict[str, float] = {}
    for weight, value in sums.items():
        group = group_of(weight, layers_per_group)
        totals[group] = totals.get(group, 0.0) + value
    return totals


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan  # an overflow shows as NaN
