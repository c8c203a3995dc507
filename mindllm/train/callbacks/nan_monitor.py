"""Stops a run whose numbers are no longer finite and says which parameter they came from."""

from __future__ import annotations

from mindllm.errors import RunFailed
from mindllm.train.callbacks.callback import Callback
from mindllm.train.state import RunState, StepRecord

NAMED = 5


class NaNMonitor(Callback):
    """An overflow that a smaller loss scale can cure is left to the scale; anything else ends the run."""

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not record.overflow or state.scaler.can_fall:
            return
        assert state.batch is not None
        names = state.engine.not_finite(state.batch)
        culprits = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        raise RunFailed(
            f"step {record.step}: loss {record.loss}, global norm {record.global_norm}: not finite; "
            f"first in {culprits or 'the loss alone'}. The update was skipped: weights and checkpoints are those of step "
            f"{record.step - 1}. Lower lr_schedule.learning_rate, lengthen the warm-up, or look at the data of this step."
        )
