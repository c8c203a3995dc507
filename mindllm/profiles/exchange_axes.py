"""Which axis of the mesh a recorded group of ranks lies along: names of groups do not say, kinds and sizes do."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from mindllm.profiles.predicted import PredictedStep
from mindllm.profiles.recorded import Collective

UNKNOWN = "unknown"
FAR = 1e3  # of a pair that cannot be told, as a logarithm


def axes_of_groups(
    groups: Mapping[tuple[str, str], Sequence[Collective]], share: float, stage: int, predicted: PredictedStep
) -> dict[tuple[str, str], Hashable]:
    """Return for every kind and group the predicted exchanges ``(kind, axis)`` that it is nearest to.

    What is compared is the bytes that a rank sends in a step, or its seconds where a recording has no bytes. Groups beyond those
    predicted are of the nearest axis; kinds that are not predicted are ``(kind, "unknown")``.
    """
    found: dict[tuple[str, str], Hashable] = {}
    for kind in dict.fromkeys(op for op, _ in groups):
        mine = [name for name in groups if name[0] == kind]
        axes = [
            key
            for key, spent in predicted.exchanges.items()
            if key[0] == kind and spent.of_stage(stage, predicted.runs) > 0
        ]
        if not axes:
            found |= dict.fromkeys(mine, (kind, UNKNOWN))
            continue
        costs = np.array([[_distance(groups[name], share, stage, predicted, key) for key in axes] for name in mine])
        chosen = dict(zip(*linear_sum_assignment(costs), strict=True))
        for number, name in enumerate(mine):
            found[name] = axes[chosen.get(number, int(costs[number].argmin()))]
    return found


def _distance(
    each: Sequence[Collective], share: float, stage: int, predicted: PredictedStep, key: tuple[str, str]
) -> float:
    own = predicted.exchanges[key]
    sent = share * sum(one.bytes for one in each)
    measured, expected = sent, float(own.bytes[stage])
    if not sent:
        measured = share * sum(one.seconds - one.waited for one in each)
        expected = own.of_stage(stage, predicted.runs)
    return abs(math.log(measured / expected)) if measured > 0 and expected > 0 else FAR
