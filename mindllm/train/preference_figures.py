"""What a step counted of pairs of answers, as the means that users of TRL know."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindllm.finetune.preference import FIGURES
from mindllm.models.experts.expert_load import PAIRS_PROBE
from mindllm.train.expert_loads import LOAD

MARGINS = "rewards/margins"


def pair_figures(counted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What ``Engine.counts`` gave, as means over the pairs of the step; nothing where it counted none.

    A reward is ``beta`` times how much likelier than the reference the model makes an answer, in nats; ``logps`` are the
    model's own log-probabilities of an answer; ``rewards/accuracies`` is the part of the pairs whose chosen answer has the
    higher reward.
    """
    sums = counted.get(LOAD + PAIRS_PROBE)
    if sums is None or not sums[-1]:
        return {}
    figures = {name: float(value / sums[-1]) for name, value in zip(FIGURES, sums, strict=False)}
    return {**figures, MARGINS: figures["rewards/chosen"] - figures["rewards/rejected"]}
