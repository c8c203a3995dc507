"""The loss of what layers predict ahead, by itself, for the callbacks that write and show it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from mindllm.models.experts.expert_load import LOSS_PROBE
from mindllm.train.callbacks.callback import Callback
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class PredictionLossMonitor(Callback):
    """Asks the engine what it counted; logs a line every ``per_print_times`` steps, and for the last step.

    In a pipeline the ranks of the last stage know it.
    """

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        state.mtp_loss = None if record.overflow else prediction_loss(state.engine.counts())
        last = record.step == state.last_step
        if state.mtp_loss is not None and (record.step % self.per_print_times == 0 or last):
            logger.info("{ mtp_loss: %.3f }", state.mtp_loss)


def prediction_loss(counted: Mapping[str, np.ndarray]) -> float | None:
    """The mean over layers of the mean loss of a token each predicts, nats, without its factor, from ``Engine.counts``.

    None where nothing was counted: there are no such layers, or they are on another stage.
    """
    sums = [values for name, values in counted.items() if LOSS_PROBE in name and values.any()]
    return float(np.mean([loss / tokens for loss, tokens in sums])) if sums else None
