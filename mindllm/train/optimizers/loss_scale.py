"""The loss scale on the host: fixed, or halved on overflow and raised after a window without one.

The rule is that of MindSpore's ``DynamicLossScaleUpdateCell`` (mixed-precision training; Micikevicius et al., 2018).
"""

from __future__ import annotations

from typing import Any

from mindllm.config.optimizer import DynamicLossScale, FixedLossScale


class LossScaler:
    """Current scale, and what it becomes after each step."""

    def __init__(self, scale_sense: float | DynamicLossScale | FixedLossScale) -> None:
        self.dynamic = isinstance(scale_sense, DynamicLossScale)
        self.value = float(scale_sense if isinstance(scale_sense, float | int) else scale_sense.loss_scale_value)
        self.factor = float(scale_sense.scale_factor) if isinstance(scale_sense, DynamicLossScale) else 1.0
        self.window = scale_sense.scale_window if isinstance(scale_sense, DynamicLossScale) else 0
        self.good_steps = 0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow is answered by a smaller scale, so that going on makes sense."""
        return self.dynamic and self.factor > 1 and self.value > 1

    def update(self, overflow: bool) -> None:
        """Takes note of one step; ``overflow``: its gradients were not finite and it was skipped."""
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(self.value / self.factor, 1.0)
        elif self.good_steps == self.window:
            self.value *= self.factor
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
        self.good_steps = int(state["good_steps"])
