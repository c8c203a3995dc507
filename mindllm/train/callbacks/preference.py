"""Rewards of chosen and rejected answers after every step, for the callbacks that write and show them."""

from __future__ import annotations

import logging

from mindllm.train.callbacks.callback import Callback
from mindllm.train.preference_figures import pair_figures
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class PreferenceMonitor(Callback):
    """Asks the engine what it counted of pairs; logs a line every ``per_print_times`` steps, and for the last step."""

    of_first_rank = True

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        state.preference = {} if record.overflow else pair_figures(state.engine.counts())
        if state.preference and (record.step % self.per_print_times == 0 or record.step == state.last_step):
            logger.info(preference_line(state.preference))


def preference_line(figures: dict[str, float]) -> str:
    """``{ rewards/chosen: 0.0112, rewards/rejected: -0.0203, …, rewards/accuracies: 75.0% }``."""
    shown = (f"{name}: {figures[name]:.4f}" for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"))
    return f"{{ {', '.join(shown)}, rewards/accuracies: {figures['rewards/accuracies']:.1%} }}"
