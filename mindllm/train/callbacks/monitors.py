"""Monitors of the steps of a run: the loss line, numbers that are no longer finite, spikes, the first step.

The loss line has the format users of MindFormers grep for, with a bar, throughput and the time that is left. The first step
compiles, which takes from seconds to minutes.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from mindllm.errors import RunFailed
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.callbacks.callback import Callback
from mindllm.train.optimizers.spikes import LOSS, NORM
from mindllm.train.state import RunState, StepRecord

BAR_WIDTH = 50
AVERAGING = 0.1  # weight of the newest step in the average the remaining time is told from
logger = logging.getLogger(__name__)
NAMED = 5
COMPILING = "compiling the training step"


class LossMonitor(Callback):
    """Logs two lines every ``per_print_times`` steps, and for the last step."""

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times
        self.usual_seconds = 0.0
        self.steps_seen = 0

    def step_end(self, state: RunState, record: StepRecord) -> None:
        # The first step compiles: it enters the average only until there is another.
        weight = 1.0 if self.steps_seen < 2 else AVERAGING
        self.usual_seconds += weight * (record.step_time_s - self.usual_seconds)
        self.steps_seen += 1
        if record.step % self.per_print_times == 0 or record.step == state.last_step:
            logger.info(loss_line(state, record))
            logger.info(progress_line(state, record, self.usual_seconds))


def loss_line(state: RunState, record: StepRecord) -> str:
    """``{ Epoch:[  1/  2], step:[    2/   19], loss: 10.633, per_step_time: 1752ms, …, train_throughput_per_npu: 170.738T``."""
    epoch, step = state.place_in_epoch(record.step)
    epochs, steps = state.place_in_epoch(state.total_steps)[0], min(state.steps_per_epoch, state.total_steps)
    return (
        f"{{ Epoch:[{epoch:3d}/{epochs:3d}], step:[{step:5d}/{steps:5d}], loss: {record.loss:.3f}, "
        f"per_step_time: {record.step_time_s * 1000:.0f}ms, lr: {record.learning_rate:.6g}, "
        f"overflow cond: {record.overflow}, loss_scale: {record.loss_scale}, global_norm: [{record.global_norm:.6g}], "
        f"train_throughput_per_npu: {record.tflops:.3f}T, mfu: {record.mfu:.1%}"
    )


def progress_line(state: RunState, record: StepRecord, usual_seconds: float) -> str:
    """``   0.0% |            | 0.00600 samples/s/p  12000 tokens/s/p  25 days, 2:07:47 }``."""
    done = record.step / state.total_steps
    bar = "█" * int(done * BAR_WIDTH)
    left = timedelta(seconds=int((state.total_steps - record.step) * usual_seconds))
    return (
        f"  {done:6.1%} |{bar:<{BAR_WIDTH}}| {record.samples_per_s_per_device:.5f} samples/s/p  "
        f"{record.tokens_per_s_per_device:.0f} tokens/s/p  {left} }}"
    )


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


class SpikeMonitor(Callback):
    """Says of every step that the guard against spikes has skipped what was past which limit; too many in a row end the run."""

    def __init__(self) -> None:
        self.limits: tuple[float, ...] = ()

    def step_begin(self, state: RunState) -> None:
        self.limits = state.spikes.limits()

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not record.skipped:
            return
        values = {NORM: record.global_norm, LOSS: record.loss}
        limits = dict(zip(state.spikes.names, self.limits, strict=True))
        past = [f"{name} {values[name]:.4g} > {limit:.4g}" for name, limit in limits.items() if values[name] > limit]
        logger.warning("step %d skipped as a spike: %s; %d so far", record.step, ", ".join(past), state.spikes.skipped)
        state.spikes.refuse_to_go_on(record.step)

    def end(self, state: RunState) -> None:
        if state.spikes.skipped:
            state.results["skipped"] = f"{state.spikes.skipped} steps as spikes"


class FirstStep(Callback):
    """Log two lines: before the first step of a process, and after it with its seconds. Report progress in between."""

    first_rank_only = True

    def __init__(self, progress: Progress = unwatched) -> None:
        self.progress = progress
        self.is_done = False

    def step_begin(self, state: RunState) -> None:
        if not self.is_done:
            kept = "; one that is kept from an earlier start is loaded" if state.config.context.compile_cache else ""
            logger.info("compiling the training step: a minute for a few layers, longer for many%s", kept)
            self.progress(COMPILING, 0, 1)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not self.is_done:
            self.is_done = True
            self.progress(COMPILING, 1, 1)
            logger.info("compiled, and step %d done, in %.1f s", record.step, record.step_time_s)
