"""A callback that compares measured steps, and device memory, with the proof of the run."""

from __future__ import annotations

import logging
import statistics

from mindllm.config import RunConfig
from mindllm.run.proof import Prediction
from mindllm.train.callbacks.callback import Callback
from mindllm.train.device import peak_memory
from mindllm.train.state import RunState, StepRecord
from mindllm.units import GIB

WINDOW_STEPS = 10  # steps per comparison; the first step of a process compiles and is not counted
COLUMN = "step_time_to_predicted"
POOL_BLOCK = GIB  # a device's memory pool grows in blocks of this size
logger = logging.getLogger(__name__)


class ProofMonitor(Callback):
    """Adds a metrics column, logs one line after ten steps, and warns when ten steps leave the predicted range."""

    first_rank_only = True

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.window: list[float] = []
        self.step_count = 0
        self.is_within = True

    def step_end(self, state: RunState, record: StepRecord) -> None:
        """Record the step, and compare the median of every ten with the prediction."""
        self.step_count += 1
        if self.step_count == 1:
            return
        state.against_proof = {COLUMN: round(record.step_time_s / self.prediction.seconds, 4)}
        self.window.append(record.step_time_s)
        if self.step_count % WINDOW_STEPS == 0:
            self._compare(state.config, record.step, statistics.median(self.window))
            self.window.clear()

    def _compare(self, config: RunConfig, step: int, seconds: float) -> None:
        predicted, error = self.prediction.seconds, self.prediction.error
        deviation = seconds / predicted - 1
        if self.step_count == WINDOW_STEPS:
            margin = f" ± {error:.0%}" if error is not None else ""
            logger.info("step time %.3f s; proved %.3f s%s (%+.1f%%)", seconds, predicted, margin, 100 * deviation)
            self._compare_memory(config)
        # Warn only on leaving the range, not in every window outside it.
        was_within, self.is_within = self.is_within, error is None or abs(deviation) <= error
        if was_within and not self.is_within:
            logger.warning(
                "steps up to %d take %.3f s, %.1f%% %s than proved and outside ±%.0f%%; %s",
                step,
                seconds,
                abs(100 * deviation),
                "more" if deviation > 0 else "less",
                100 * (error or 0.0),
                "check for a slow rank (slowest_rank in the metrics) and take a profile"
                if deviation > 0
                else "calibrate the device description with these steps (mindllm time calibrate)",
            )

    def _compare_memory(self, config: RunConfig) -> None:
        """Compare the peak of an accelerator with the proof. This has not been run on a device."""
        peak, proved = peak_memory(config), self.prediction.peak
        if peak is None or proved is None:
            return
        logger.info("peak memory of this rank %.1f GB; proved %.1f GB", peak / GIB, proved / GIB)
        if peak > proved + POOL_BLOCK:
            logger.warning("peak memory is %.1f GB above the proof", (peak - proved) / GIB)
