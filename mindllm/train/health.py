"""The health figures of a step by group of layers, from the sums of squares that its compiled cells gave (``watched``).

Every part of a weight counts once, on the first rank that has it: so figures are those of one device, whatever is sharded.
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
"""By figure and by weight the sum of squares over the whole weight, float64; of attention by layer the largest logit."""
LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)")
ATTENTION, FEED_FORWARD, NORMS, HEAD, EMBEDDING = "attention", "feed_forward", "norms", "head", "embedding"


def by_weight(kinds: Sequence[str], names: Sequence[str], sums: np.ndarray) -> dict[str, dict[str, float]]:
    """``sums`` ``[kinds, weights]`` by their names."""
    return {kind: dict(zip(names, map(float, row), strict=True)) for kind, row in zip(kinds, sums, strict=True)}


def largest_of(logits: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """The largest of all ranks by layer, where each knows those of its own layers and tokens; every rank calls it."""
    if ranks.count == 1:
        return dict(logits)
    layers = max(map(int, logits), default=-1) + 1
    layers = max(int(count) for count in _of_each(float(layers), ranks))
    columns = [_of_each(logits.get(str(layer), math.nan), ranks) for layer in range(layers)]
    known = {str(layer): [value for value in column if not math.isnan(value)] for layer, column in enumerate(columns)}
    return {layer: max(values) for layer, values in known.items() if values}


def _of_each(value: float, ranks: Ranks) -> list[float]:
    """The values of all ranks, in their order."""
    return ranks.sum([value if rank == ranks.rank else 0.0 for rank in range(ranks.count)])


def group_of(weight: str, layers_per_group: int = 1) -> str:
    """The group of a weight: `embedding`, `head` (with the last norm), or a part of its layers such as `layers_0.attention`.

    With several layers in a group: `layers_0-3.attention`.
    """
    found = LAYER.match(weight)
    if found is None:
        return EMBEDDING if "embedding" in weight else HEAD
    number, part = int(found[1]), found[2]
    first = number - number % layers_per_group
    layers = f"{first}" if layers_per_group == 1 else f"{first}-{first + layers_per_group - 1}"
    return f"layers_{layers}.{part if part in (ATTENTION, FEED_FORWARD) else NORMS if 'norm' in part else part}"


def health_figures(watched: Watched, norm: float, applied: bool, config: RunConfig) -> dict[str, float]:
    """The figures of a step by ``figure/group``; of one that was not applied there is no update.

    Args:
        watched: of the whole model.
        norm: of all gradients together; the scale in which they were summed follows from it.
    """
    size, asked = config.monitor_config.layers_per_group, config.monitor_config.watched()
    grouped = {kind: _grouped(sums, size) for kind, sums in watched.items() if kind != LOGIT}
    squares = grouped.get(GRADIENT, {})
    whole = _root(sum(squares.values()))
    unscale = norm / whole if whole else 0.0
    figures = {f"{GRADIENT}/{group}": _root(total) * unscale for group, total in squares.items()}
    if WEIGHT in asked:
        figures |= {f"{WEIGHT}/{group}": _root(total) for group, total in grouped.get(WEIGHT, {}).items()}
    if applied:
        figures |= _ratios(grouped.get(UPDATE, {}), grouped.get(WEIGHT, {}))
    return figures | {f"{LOGIT}/layer_{layer}": logit for layer, logit in watched.get(LOGIT, {}).items()}


def _ratios(updates: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Weights that are all zero have no ratio."""
    return {f"{UPDATE}/{group}": _root(total / weights[group]) for group, total in updates.items() if weights[group]}


def _grouped(sums: Mapping[str, float], layers_per_group: int) -> dict[str, float]:
    totals: dict[str, float] = {}
    for weight, value in sums.items():
        group = group_of(weight, layers_per_group)
        totals[group] = totals.get(group, 0.0) + value
    return totals


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan  # NaN is no error here
