"""The health figures of every so many steps, for the callbacks that write and show them (section ``monitor_config``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mindllm.train.callbacks.callback import Callback
from mindllm.train.health import health_figures
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class HealthMonitor(Callback):
    """Asks the engine for what it watched. All ranks have it: each knows its own parts of the weights.

    ``logs``: it writes the lines of the log.
    """

    def __init__(self, logs: bool = True) -> None:
        self.logs = logs

    def step_end(self, state: RunState, record: StepRecord) -> None:
        settings = state.config.monitor_config
        if record.step % settings.step_interval and record.step != state.last_step:
            state.health = {}
            return
        state.health = health_figures(state.engine.watched(), record.global_norm, record.applied, state.config)
        for figure in settings.logged() if self.logs else ():
            logger.info(health_line(figure, state.health))


def health_line(figure: str, figures: Mapping[str, float]) -> str:
    """``{ grad_norm: embedding 0.943, layers_0.attention 0.161, …, head 0.753 }``."""
    begins = f"{figure}/"
    found = (f"{name.removeprefix(begins)} {value:.4g}" for name, value in figures.items() if name.startswith(begins))
    return f"{{ {figure}: {', '.join(found) or 'none: the step was not applied'} }}"
