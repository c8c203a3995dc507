"""Base class of callbacks, which are notified of the beginning, the steps and the end of training."""

from __future__ import annotations

from mindllm.train.state import RunState, StepRecord


class Callback:
    """Does nothing. A subclass overrides the events it handles.

    ``first_rank_only``: only the first rank has it, because it writes a file that all ranks share.
    """

    first_rank_only = False

    def begin(self, state: RunState) -> None:
        """Handle the beginning, before the first step. In a resumed run ``state.step`` is not 0."""

    def step_begin(self, state: RunState) -> None:
        """Handle the beginning of step ``state.step + 1``."""

    def step_end(self, state: RunState, record: StepRecord) -> None:
        """Handle the end of step ``record.step``."""

    def end(self, state: RunState) -> None:
        """Handle the end of training, also after a stop signal, but not after an error."""

    def rescue(self, state: RunState) -> None:
        """Save what an error would lose. ``state`` is that after the last complete step."""

    def close(self) -> None:
        """Release files. Always called."""
