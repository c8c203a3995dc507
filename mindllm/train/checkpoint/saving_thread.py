"""Saves checkpoints while training goes on: copied to the host on the step's path, written by a thread beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.train.checkpoint.parts import RankTensors
from mindllm.train.checkpoint.store import CheckpointStore


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk; seconds that training stood still, and that writing took in all."""

    step: int
    path: Path
    stopped: float
    written: float


class SavingThread:
    """Saves one checkpoint after the other; the next one waits for the last. It takes the host memory of what is saved."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[Saved] | None = None

    def save(self, step: int, held: Mapping[int, RankTensors], state: dict[str, Any]) -> Saved | None:
        """Waits for the last checkpoint, copies ``held`` to the host and begins to write; returns the last one.

        Raises:
            CheckpointNotSavedError: the last one could not be written; the new one has not been begun.
        """
        start = time.perf_counter()
        last = self.finish()
        copies = {rank: tensors.on_host() for rank, tensors in held.items()}
        stopped = time.perf_counter() - start
        self._last = self._pool.submit(self._write, step, copies, state, stopped)
        return last

    def poll(self) -> Saved | None:
        """The checkpoint that has become whole since it was last asked for; errors as :meth:`finish`."""
        return self.finish() if self._last is not None and self._last.done() else None

    def finish(self) -> Saved | None:
        """Waits for the checkpoint that is being written.

        Raises:
            CheckpointNotSavedError: it could not be written.
        """
        last, self._last = self._last, None
        return last.result() if last is not None else None

    def close(self) -> None:
        """Waits for the thread; what it was writing is whole or absent."""
        self._pool.shutdown(wait=True)

    def _write(self, step: int, held: Mapping[int, RankTensors], state: dict[str, Any], stopped: float) -> Saved:
        start = time.perf_counter()
        path = self.store.save(step, held, state)
        return Saved(step, path, stopped, time.perf_counter() - start)
