"""Saves checkpoints every so many steps, at the end, and when the run is asked to stop or an error ends it."""

from __future__ import annotations

import logging
from pathlib import Path

from mindllm.train.callbacks.callback import Callback
from mindllm.train.checkpoint import CheckpointNotSavedError, CheckpointStore, SavingThread
from mindllm.train.checkpoint.store import SavedCheckpoint
from mindllm.train.job.resume import run_state
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class CheckpointMonitor(Callback):
    """Weights, optimizer state, loss scale, position in the data and identity of the run; every rank saves what it holds.

    A save that fails is reported and training goes on; when the last one fails, so does the run.
    """

    def __init__(self, store: CheckpointStore, save_checkpoint_steps: int, async_save: bool = False) -> None:
        self.store = store
        self.save_checkpoint_steps = save_checkpoint_steps
        self.thread = SavingThread(store) if async_save else None
        self.saved_step = -1
        self.problem = ""
        self.newest: Path | None = None  # that this run has saved; it is never the one that makes room
        self.lost = ""

    def begin(self, state: RunState) -> None:
        self.saved_step = state.step

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if self.thread is not None:
            self._collect(self.thread.poll)
        if record.step % self.save_checkpoint_steps == 0:
            self.save(state)

    def end(self, state: RunState) -> None:
        self._notice_loss()
        self._save_the_last(state)
        state.failures += filter(None, (self.lost, self.problem))
        newest = self.store.newest()
        if newest is not None:
            state.results["checkpoint"] = str(newest)

    def rescue(self, state: RunState) -> None:
        self._save_the_last(state)

    def close(self) -> None:
        if self.thread is not None:
            self._collect(self.thread.finish)
            self.thread.close()

    def save(self, state: RunState) -> None:
        """Saves now, or begins to; a full disk is reported and training goes on."""
        self._notice_loss()
        if self.thread is None:
            self._save_and_wait(state)
            return
        self._collect(self.thread.finish)
        self.thread.save(state.step, state.engine.local_state(), run_state(state))

    def _save_the_last(self, state: RunState) -> None:
        if self.thread is not None:
            self._collect(self.thread.finish)
        if state.step > self.saved_step:
            self._save_and_wait(state)

    def _save_and_wait(self, state: RunState) -> None:
        try:
            path = self.store.save(state.step, state.engine.local_state(), run_state(state))
        except CheckpointNotSavedError as error:
            self._failed(error)
            return
        self._succeeded(state.step, path)
        if self.store.peers.is_first:
            logger.info("saved checkpoint %s", path)

    def _collect(self, ask) -> None:
        """Takes note of what the thread has done since."""
        try:
            saved: SavedCheckpoint | None = ask()
        except CheckpointNotSavedError as error:
            self._failed(error)
            return
        if saved is None:
            return
        self._succeeded(saved.step, saved.path)
        if self.store.peers.is_first:
            times = f"training stopped {saved.blocked:.2f} s, written beside it in {saved.written:.2f} s"
            logger.info("saved checkpoint (%s) %s", times, saved.path)

    def _succeeded(self, step: int, path: Path) -> None:
        self.saved_step, self.newest, self.problem = step, path, ""

    def _notice_loss(self) -> None:
        """Says that checkpoints were deleted beside the run, once; training goes on, and saves new ones."""
        if self.newest is not None and not self.newest.exists() and self.store.peers.is_first:
            self.lost = f"{self.newest} was deleted or moved during the run"
            logger.error("%s; training goes on and saves new ones", self.lost)
            self.newest = None

    def _failed(self, error: CheckpointNotSavedError) -> None:
        self.problem = str(error)
        logger.error("%s", error)
