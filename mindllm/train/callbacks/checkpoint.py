"""Callback that saves checkpoints at an interval, at the end, and after a stop signal or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindllm.train.callbacks.callback import Callback
from mindllm.train.checkpoint import CheckpointNotSavedError, CheckpointStore, Part, SavingThread
from mindllm.train.checkpoint.store import SavedCheckpoint
from mindllm.train.job.resume import run_state
from mindllm.train.state import RunState, StepRecord

MAX_CHECKPOINT_BYTES = 2 << 30  # of a simulated checkpoint, whose values nobody needs
logger = logging.getLogger(__name__)


class CheckpointMonitor(Callback):
    """Saves weights, optimizer state, loss scale, data position and identity of the run. Every rank saves its part.

    A failed save is logged and training continues. If the last save fails, so does the run.
    """

    def __init__(self, store: CheckpointStore, save_checkpoint_steps: int, async_save: bool = False) -> None:
        self.store = store
        self.save_checkpoint_steps = save_checkpoint_steps
        self.thread = SavingThread(store) if async_save else None
        self.saved_step = -1
        self.problem = ""
        self.newest: Path | None = None  # saved by this run; never the one that is deleted for space
        self.lost = ""

    def begin(self, state: RunState) -> None:
        self.saved_step = state.step

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if self.thread is not None:
            self._collect(self.thread.poll)
        if record.step % self.save_checkpoint_steps == 0:
            self.save(state)

    def end(self, state: RunState) -> None:
        self._check_newest()
        self._save_final(state)
        state.failures += filter(None, (self.lost, self.problem))
        newest = self.store.newest()
        if newest is not None:
            state.results["checkpoint"] = str(newest)

    def rescue(self, state: RunState) -> None:
        self._save_final(state)

    def close(self) -> None:
        if self.thread is not None:
            self._collect(self.thread.finish)
            self.thread.close()

    def save(self, state: RunState) -> None:
        """Save now, or start saving in the background. An error is logged and training continues."""
        self._check_newest()
        if self.thread is None:
            self._save_synchronously(state)
            return
        self._collect(self.thread.finish)
        self.thread.save(state.step, state.engine.local_state(), run_state(state))

    def _save_final(self, state: RunState) -> None:
        if self.thread is not None:
            self._collect(self.thread.finish)
        if state.step > self.saved_step:
            self._save_synchronously(state)

    def _save_synchronously(self, state: RunState) -> None:
        try:
            path = self.store.save(state.step, state.engine.local_state(), run_state(state))
        except CheckpointNotSavedError as error:
            self._on_failure(error)
            return
        self._on_success(state.step, path)
        if self.store.peers.is_first:
            logger.info("saved checkpoint %s", path)

    def _collect(self, result: Callable[[], SavedCheckpoint | None]) -> None:
        """Record the outcome of the background thread, from its ``poll`` or ``finish``."""
        try:
            saved = result()
        except CheckpointNotSavedError as error:
            self._on_failure(error)
            return
        if saved is None:
            return
        self._on_success(saved.step, saved.path)
        if self.store.peers.is_first:
            times = f"training paused {saved.blocked:.2f} s, written in the background in {saved.written:.2f} s"
            logger.info("saved checkpoint (%s) %s", times, saved.path)

    def _on_success(self, step: int, path: Path) -> None:
        self.saved_step, self.newest, self.problem = step, path, ""

    def _check_newest(self) -> None:
        """Log an error once if the newest checkpoint was deleted during the run."""
        if self.newest is not None and not self.newest.exists() and self.store.peers.is_first:
            self.lost = f"{self.newest} was deleted or moved during the run"
            logger.error("%s; training continues and saves new ones", self.lost)
            self.newest = None

    def _on_failure(self, error: CheckpointNotSavedError) -> None:
        self.problem = str(error)
        logger.error("%s", error)


class SimulatedCheckpointMonitor(CheckpointMonitor):
    """Saves the tensors of a simulated rank if they are small; otherwise logs their size."""

    def save(self, state: RunState) -> None:
        if self._is_small(state):
            super().save(state)

    def _save_synchronously(self, state: RunState) -> None:
        if self._is_small(state):
            super()._save_synchronously(state)

    def _is_small(self, state: RunState) -> bool:
        local = state.engine.local_state()[state.engine.ranks.rank]
        size = 0
        for item in (*local.weights.values(), *local.optimizer.values()):
            value = item.value if isinstance(item, Part) else item
            size += int(np.prod(value.shape)) * np.dtype(value.dtype).itemsize
        if size > MAX_CHECKPOINT_BYTES:
            logger.info("this rank's part of a checkpoint is %.1f GB; it is not written in a simulation", size / 1e9)
        return size <= MAX_CHECKPOINT_BYTES
