"""Whether every weight is decayed as much as on a single device, found in the updates themselves.

In short floating types rounding changes gradients by more than a decay changes weights. But weights and moments are fp32 on
both sides: what is left of an update without Adam's part, which the new moments give, is the decay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mindllm.compiled.execute.cluster import Cluster
from mindllm.compiled.execute.state import MOMENTS
from mindllm.config import OptimizerConfig

Arrays = Mapping[str, np.ndarray]
POWERS = ("beta1_power", "beta2_power")
TOLERANCE = 1e-3
"""Of a decay, which is a number such as 0.1; rounding of fp32 changes it by about 1e-5."""


class Updates:
    """One optimizer step of a single device: weights and state ``before`` and ``after`` it, at a learning ``rate``."""

    def __init__(self, optimizer: OptimizerConfig, rate: float, before: Arrays, after: Arrays) -> None:
        self.epsilon, self.rate = optimizer.eps, rate
        weights = [name for name in before if f"{MOMENTS[0]}{name}" in after]
        self.decays = {name: self.decay(name, before, after) for name in weights}

    def decay(self, name: str, before: Arrays, after: Arrays) -> float:
        """The decay in the update of one weight: ``w' = w - rate · (m̂ / (√v̂ + ε) + decay · w)``, by least squares over ``w``."""
        old, new, *moments = (
            np.asarray(array, np.float64)
            for array in (before[name], after[name], *(after[f"{prefix}{name}"] for prefix in MOMENTS))
        )
        first, second = (moment / (1 - float(after[power])) for moment, power in zip(moments, POWERS, strict=True))
        decayed = (old - new) / self.rate - first / (np.sqrt(second) + self.epsilon)
        return float(np.sum(decayed * old) / np.sum(old * old))

    def decay_errors(self, cluster: Cluster, before: Sequence[Arrays]) -> Iterator[str]:
        """Weights that a rank decays otherwise; ``before`` has the parameters of every rank before the step."""
        for machine, old in zip(cluster.machines, before, strict=True):
            new = machine.values()
            for name, wanted in self.decays.items():
                if f"{MOMENTS[0]}{name}" not in new:
                    continue
                found = self.decay(name, old, new)
                if not abs(found - wanted) <= TOLERANCE:
                    yield f"weight decay of {name} on rank {machine.rank}: {found:.4g}, {wanted:.4g} on a single device"
