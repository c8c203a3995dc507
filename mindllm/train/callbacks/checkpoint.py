"""Saves checkpoints every so many steps, at the end, and when the run is asked to stop."""

from __future__ import annotations

import logging

from mindllm.train.callbacks.callback import Callback
from mindllm.train.checkpoint import CheckpointNotSavedError, CheckpointStore
from mindllm.train.resume import run_state
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class CheckpointMonitor(Callback):
    """Weights, optimizer state, loss scale, position in the data and identity of the run."""

    of_first_rank = True

    def __init__(self, store: CheckpointStore, save_checkpoint_steps: int) -> None:
        self.store = store
        self.save_checkpoint_steps = save_checkpoint_steps
        self.saved_step = -1

    def begin(self, state: RunState) -> None:
        self.saved_step = state.step
        for path in self.store.supersede_after(state.step):
            logger.info("a checkpoint after step %d, where training starts, was set aside: %s", state.step, path)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if record.step % self.save_checkpoint_steps == 0:
            self.save(state)

    def end(self, state: RunState) -> None:
        if state.step > self.saved_step:
            self.save(state)
        newest = self.store.newest()
        if newest is not None:
            state.results["checkpoint"] = str(newest)

    def save(self, state: RunState) -> None:
        """Saves now; a full disk is reported and training goes on."""
        try:
            path = self.store.save(state.step, state.engine.held(), run_state(state))
        except CheckpointNotSavedError as error:
            logger.error("%s", error)
            return
        self.saved_step = state.step
        logger.info("saved checkpoint %s", path)
