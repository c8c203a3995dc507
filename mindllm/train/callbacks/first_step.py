"""Says that the first step compiles, which takes from seconds to minutes in which nothing else is said."""

from __future__ import annotations

import logging

from mindllm.train.callbacks.callback import Callback
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class FirstStep(Callback):
    """Two lines of the log: before the first step of a process, and after it with the seconds it took."""

    of_first_rank = True

    def __init__(self) -> None:
        self.is_done = False

    def step_begin(self, state: RunState) -> None:
        if not self.is_done:
            kept = "; one that is kept from an earlier start is loaded" if state.config.context.compile_cache else ""
            logger.info("compiling the training step: up to a minute, more for many layers%s", kept)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not self.is_done:
            self.is_done = True
            logger.info("compiled, and step %d done, in %.1f s", record.step, record.step_time_s)
