"""What a callback is: a watcher of the training loop, told of its begin, its steps and its end."""

from __future__ import annotations

from mindllm.train.state import RunState, StepRecord


class Callback:
    """Does nothing; a subclass overrides what it wants to be told of. One subject, one file.

    ``first_rank_only``: it writes what a run has once, so of several ranks only the first one has it.
    """

    first_rank_only = False

    def begin(self, state: RunState) -> None:
        """Before the first step; ``state.step`` is not 0 when the run is resumed."""

    def step_begin(self, state: RunState) -> None:
        """Before step ``state.step + 1``."""

    def step_end(self, state: RunState, record: StepRecord) -> None:
        """After step ``record.step``."""

    def end(self, state: RunState) -> None:
        """After the last step of this process, also when it was asked to stop; not after an error."""

    def rescue(self, state: RunState) -> None:
        """After an error that left ``state`` as it was after its last step: saves what would be lost."""

    def close(self) -> None:
        """Always, whatever happened: releases files."""
