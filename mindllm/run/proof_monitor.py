"""Measured steps, and the memory of a device, held against what the proof of a run predicts."""

from __future__ import annotations

import logging
import statistics

from mindllm.config import RunConfig
from mindllm.run.proved import Predicted
from mindllm.train.callbacks.callback import Callback
from mindllm.train.device import peak_memory
from mindllm.train.state import RunState, StepRecord
from mindllm.units import GIB

STEPS = 10  # of a window; the first step of a process compiles and is in none
COLUMN = "step_time_to_predicted"
BLOCK = GIB  # by which the memory pool of a device grows
logger = logging.getLogger(__name__)


class ProofMonitor(Callback):
    """A line after ten steps, a column of the metrics, and a warning whenever ten steps leave the stated range."""

    of_first_rank = True

    def __init__(self, predicted: Predicted) -> None:
        self.predicted = predicted
        self.window: list[float] = []
        self.seen = 0
        self.is_within = True

    def step_end(self, state: RunState, record: StepRecord) -> None:
        """Note the step; every ten are judged together."""
        self.seen += 1
        if self.seen == 1:
            return
        state.against_proof = {COLUMN: round(record.step_time_s / self.predicted.seconds, 4)}
        self.window.append(record.step_time_s)
        if self.seen % STEPS == 0:
            self._judge(state.config, record.step, statistics.median(self.window))
            self.window.clear()

    def _judge(self, config: RunConfig, step: int, seconds: float) -> None:
        predicted = self.predicted
        off = seconds / predicted.seconds - 1
        known = f" ± {predicted.error:.0%}" if predicted.error is not None else ""
        if self.seen == STEPS:
            logger.info("a step takes %.3f s; proved: %.3f s%s (%+.1f%%)", seconds, predicted.seconds, known, 100 * off)
            self._judge_memory(config)
        was_within, self.is_within = self.is_within, predicted.error is None or abs(off) <= predicted.error
        if was_within and not self.is_within:
            logger.warning(
                "steps up to %d take %.3f s, %.1f%% %s than proved and past the range of ±%.0f%%; %s",
                step,
                seconds,
                abs(100 * off),
                "more" if off > 0 else "less",
                100 * (predicted.error or 0.0),
                "look for a slow rank (slowest_rank of the metrics) and at a profile"
                if off > 0
                else "calibrate the described device with them (mindllm time calibrate)",
            )

    def _judge_memory(self, config: RunConfig) -> None:
        """On a device alone; no device was at hand, so this was never run on one."""
        peak, proved = peak_memory(config), self.predicted.peak
        if peak is None or proved is None:
            return
        logger.info("peak memory of this rank is %.1f GB; proved: %.1f GB", peak / GIB, proved / GIB)
        if peak > proved + BLOCK:
            logger.warning("peak memory is %.1f GB more than proved", (peak - proved) / GIB)
