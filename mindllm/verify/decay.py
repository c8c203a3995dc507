"""Whether every weight is decayed as much as on a single device, found in the updates themselves.

In short floating types rounding changes gradients by more than a decay changes weights. But weights and moments are fp32 on
both sides: what is left of an update without Adam's part, which the new moments give, is the decay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mindllm.architecture.optimizer_state import LAYER_POWERS, MOMENT_PREFIXES, POWERS, is_of_layer
from mindllm.compiled.execute.cluster import Cluster
from mindllm.config import OptimizerConfig

Arrays = Mapping[str, np.ndarray]
TOLERANCE = 1e-3
"""Of a decay, which is a number such as 0.1; rounding of fp32 changes it by about 1e-5."""


class Updates:
    """One optimizer step of a single device: weights and state ``before`` and ``after`` it, at a learning ``rate``.

    Weights whose moments are projected (GaLore) are left out: their update does not follow from moments alone.
    """

    def __init__(self, optimizer: OptimizerConfig, rate: float, before: Arrays, after: Arrays) -> None:
        self.epsilon, self.rate, self.corrects = optimizer.eps, rate, optimizer.bias_correction
        moments = {name: after.get(f"{MOMENT_PREFIXES[0]}{name}") for name in before}
        weights = [
            name for name, moment in moments.items() if moment is not None and moment.shape == before[name].shape
        ]
        self.decays = {name: self.decay(name, before, after) for name in weights}

    def decay(self, name: str, before: Arrays, after: Arrays) -> float:
        """The decay in the update of one weight: ``w' = w - rate · (m̂ / (√v̂ + ε) + decay · w)``, by least squares over ``w``.

        Without ``optimizer.bias_correction`` moments are taken as they are. Zero where LISA did not draw the weight's layer; of
        those that it draws, the correction begins anew.
        """
        old, new, *moments = (
            np.asarray(array, np.float64)
            for array in (before[name], after[name], *(after[f"{prefix}{name}"] for prefix in MOMENT_PREFIXES))
        )
        if np.array_equal(old, new):
            return 0.0
        powers = LAYER_POWERS if LAYER_POWERS[0] in after and is_of_layer(name) else POWERS
        left = [1 - float(after[power]) if self.corrects else 1.0 for power in powers]
        first, second = (moment / part for moment, part in zip(moments, left, strict=True))
        decayed = (old - new) / self.rate - first / (np.sqrt(second) + self.epsilon)
        return float(np.sum(decayed * old) / np.sum(old * old))

    def decay_errors(self, cluster: Cluster, before: Sequence[Arrays]) -> Iterator[str]:
        """Weights that a rank decays otherwise; ``before`` has the parameters of every rank before the step."""
        for machine, old in zip(cluster.machines, before, strict=True):
            new = machine.values()
            for name, wanted in self.decays.items():
                if f"{MOMENT_PREFIXES[0]}{name}" not in new:
                    continue
                found = self.decay(name, old, new)
                if not abs(found - wanted) <= TOLERANCE:
                    rank = f"{name} on rank {machine.rank}"
                    yield f"weight decay of {rank}: {_text(found)}, {_text(wanted)} on a single device"


def _text(decay: float) -> str:
    """Three digits; no minus before a zero."""
    return f"{round(decay, 3) + 0.0:g}"
