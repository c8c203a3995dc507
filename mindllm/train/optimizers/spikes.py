"""A guard against loss spikes: the update of a step whose loss or gradient norm leaves its running range is skipped.

The range is that of OLMo 2 (OLMo et al., 2024, section 4.3; ``SkipStepOptimizer`` of OLMo-core): mean and standard deviation of
the last steps, six deviations above. It is kept on the host from what every rank is told alike, saved with a checkpoint, and
given to the compiled step as its limits, so all ranks skip the same steps and a resumed run skips those of the uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import numpy as np

from mindllm.config import RunConfig
from mindllm.errors import RunFailed

NORM, LOSS = "norm", "loss"


def limits_of_step(config: RunConfig) -> tuple[str, ...]:
    """What the compiled step has limits of, in the order of its inputs; the loss is known on the last stage alone."""
    if config.runner_wrapper.skip_spikes is None:
        return ()
    return (NORM,) if config.parallel_config.pipeline_stage > 1 else (NORM, LOSS)


class SpikeGuard:
    """The running ranges, and the steps that were skipped: all in a row, and in the whole run."""

    def __init__(self, config: RunConfig) -> None:
        self.settings, self.names = config.runner_wrapper.skip_spikes, limits_of_step(config)
        asked = self.settings.watch if self.settings else ()
        self.watched = [name for name in self.names if name in asked or not asked]
        window = self.settings.window if self.settings else 0
        self.seen = {name: deque[float](maxlen=window) for name in self.watched}
        self.skipped = self.in_a_row = 0

    def limits(self) -> tuple[float, ...]:
        """The largest values that are no spike, fp32, infinity while half a window has not been seen."""
        return tuple(self._limit(name) for name in self.names)

    def _limit(self, name: str) -> float:
        seen = self.seen.get(name, ())
        if self.settings is None or len(seen) < max(2, self.settings.window // 2):
            return math.inf
        limit = statistics.fmean(seen) + self.settings.deviations * statistics.stdev(seen)
        return float(np.float32(limit))

    def update(self, loss: float, norm: float, overflow: bool, skipped: bool) -> None:
        """Takes note of a step; those that were not applied are no part of the range."""
        self.skipped += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else self.in_a_row * overflow
        if not (overflow or skipped):
            for name, value in ((NORM, norm), (LOSS, loss)):
                if name in self.seen and math.isfinite(value):  # a simulation has no values
                    self.seen[name].append(value)

    def check_consecutive(self, step: int) -> None:
        """Raises RunFailed where as many steps in a row were skipped as the configuration bears."""
        if self.settings is not None and self.settings.stop_after and self.in_a_row >= self.settings.stop_after:
            raise RunFailed(
                f"step {step}: {self.in_a_row} steps in a row were skipped as spikes (runner_wrapper.skip_spikes.stop_after "
                f"{self.settings.stop_after}): weights are those of step {step - self.in_a_row}. Lower "
                "lr_schedule.learning_rate, look at the data of these steps, or go on from an earlier checkpoint"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        seen = {name: list(values) for name, values in self.seen.items()}
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "seen": seen}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from what a checkpoint keeps; one that was written without a guard keeps nothing."""
        self.skipped, self.in_a_row = int(state.get("skipped", 0)), int(state.get("in_a_row", 0))
        for name, values in state.get("seen", {}).items():
            if name in self.seen:
                self.seen[name].extend(map(float, values))
