"""The batches of a run, one ahead of the step: where one cannot be made, all ranks stop after the same step and save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mindllm.errors import RunFailed
from mindllm.train.checkpoint.joint import named

DATA_FAILED = "data"
Batch = Mapping[str, np.ndarray]


class BatchAhead:
    """Takes batches from ``source``; an error while one is made waits until the run has saved what it has."""

    def __init__(self, source: Iterator[Batch]) -> None:
        self._source = source
        self._next: Batch | None = None
        self._error: Exception | None = None
        self.fetch()
        if self._error is not None:  # before any step there is nothing to save
            raise self._error

    @property
    def problem(self) -> str:
        """``DATA_FAILED`` when the next batch could not be made, else empty."""
        return DATA_FAILED if self._error is not None else ""

    def take(self) -> Batch | None:
        """The batch of the next step; None after the last one."""
        batch, self._next = self._next, None
        return batch

    def fetch(self) -> None:
        """Makes the next batch ready."""
        try:
            self._next = next(self._source, None)
        except Exception as error:
            self._error = error

    def raise_failed(self, ranks: list[int]) -> None:
        """Raises what kept the run from its next batch: the error, or which of the other ``ranks`` had one."""
        if self._error is not None:
            raise self._error
        raise RunFailed(f"{named(ranks)} could not make the next batch; the log of that rank says why")
