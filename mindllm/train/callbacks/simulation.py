"""What a simulated run tells and saves: that its steps were executed, and no numbers, as nothing is computed."""

from __future__ import annotations

import logging

import numpy as np

from mindllm.train.callbacks.callback import Callback
from mindllm.train.callbacks.checkpoint import CheckpointMonitor
from mindllm.train.checkpoint import Part
from mindllm.train.state import RunState, StepRecord

MOST_BYTES = 2 << 30  # of a checkpoint whose values nobody needs
logger = logging.getLogger(__name__)


class SimulationMonitor(Callback):
    """Logs every step."""

    def step_end(self, state: RunState, record: StepRecord) -> None:
        logger.info("simulated step %d of %d: %.3f s on the host", record.step, state.last_step, record.step_time_s)


class SimulatedCheckpoints(CheckpointMonitor):
    """Saves what the rank keeps, unless that is so large that only its size is of interest."""

    def save(self, state: RunState) -> None:
        if self._is_small(state):
            super().save(state)

    def _save_and_wait(self, state: RunState) -> None:
        if self._is_small(state):
            super()._save_and_wait(state)

    def _is_small(self, state: RunState) -> bool:
        held = state.engine.local_state()[state.engine.ranks.rank]
        size = sum(_bytes(item) for tensors in (held.weights, held.optimizer) for item in tensors.values())
        if size > MOST_BYTES:
            logger.info("this rank's part of a checkpoint is %.1f GB; it is not written in a simulation", size / 1e9)
        return size <= MOST_BYTES


def _bytes(item) -> int:
    value = item.value if isinstance(item, Part) else item
    return int(np.prod(value.shape)) * np.dtype(value.dtype).itemsize
