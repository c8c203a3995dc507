"""The steps of a simulated run: that they were executed, and no numbers, as nothing is computed."""

from __future__ import annotations

import logging

from mindllm.train.callbacks.callback import Callback
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class SimulationMonitor(Callback):
    """Logs every step."""

    def step_end(self, state: RunState, record: StepRecord) -> None:
        logger.info(
            "simulated step %d of %d: %d ms on the host", record.step, state.last_step, round(record.step_time_s * 1000)
        )
