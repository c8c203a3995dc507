"""Callbacks that log: loss, values that are not finite, spikes, the first step, simulated steps, held-out loss.

The loss line has MindFormers' format, with a progress bar, throughput and remaining time.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from datetime import timedelta

from mindllm.errors import RunFailed
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.callbacks.callback import Callback
from mindllm.train.evaluation import Evaluator
from mindllm.train.metrics_file import MetricsFile
from mindllm.train.optimizers.spikes import LOSS, NORM
from mindllm.train.state import RunState, StepRecord

BAR_WIDTH = 50
AVERAGING = 0.1  # weight of the newest step in the average step time
EVALUATION_NAME = "evaluation.jsonl"
NAMED = 5
COMPILING = "compiling the training step"
logger = logging.getLogger(__name__)


class LossMonitor(Callback):
    """Logs loss and progress every ``per_print_times`` steps and after the last step."""

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times
        self.average_seconds = 0.0
        self.step_count = 0

    def step_end(self, state: RunState, record: StepRecord) -> None:
        # The first step compiles, so the second one replaces it in the average.
        weight = 1.0 if self.step_count < 2 else AVERAGING
        self.average_seconds += weight * (record.step_time_s - self.average_seconds)
        self.step_count += 1
        if record.step % self.per_print_times == 0 or record.step == state.last_step:
            logger.info(loss_line(state, record))
            logger.info(progress_line(state, record, self.average_seconds))


def loss_line(state: RunState, record: StepRecord) -> str:
    """Return ``{ Epoch:[  1/  2], step:[    2/   19], loss: 10.633, …, train_throughput_per_npu: 170.738T``."""
    epoch, step = state.place_in_epoch(record.step)
    epochs, steps = state.place_in_epoch(state.total_steps)[0], min(state.steps_per_epoch, state.total_steps)
    return (
        f"{{ Epoch:[{epoch:3d}/{epochs:3d}], step:[{step:5d}/{steps:5d}], loss: {record.loss:.3f}, "
        f"per_step_time: {record.step_time_s * 1000:.0f}ms, lr: {record.learning_rate:.6g}, "
        f"overflow cond: {record.overflow}, loss_scale: {record.loss_scale}, global_norm: [{record.global_norm:.6g}], "
        f"train_throughput_per_npu: {record.tflops:.3f}T, mfu: {record.mfu:.1%}"
    )


def progress_line(state: RunState, record: StepRecord, average_seconds: float) -> str:
    """Return ``   0.0% |            | 0.00600 samples/s/p  12000 tokens/s/p  25 days, 2:07:47 }``."""
    done = record.step / state.total_steps
    bar = "█" * int(done * BAR_WIDTH)
    remaining = timedelta(seconds=int((state.total_steps - record.step) * average_seconds))
    return (
        f"  {done:6.1%} |{bar:<{BAR_WIDTH}}| {record.samples_per_s_per_device:.5f} samples/s/p  "
        f"{record.tokens_per_s_per_device:.0f} tokens/s/p  {remaining} }}"
    )


class NaNMonitor(Callback):
    """Ends the run if values are not finite, unless a smaller loss scale can prevent the overflow."""

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not record.overflow or state.scaler.can_fall:
            return
        assert state.batch is not None
        names = state.engine.not_finite(state.batch)
        sources = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        raise RunFailed(
            f"step {record.step}: loss {record.loss}, global norm {record.global_norm}: not finite; "
            f"first in {sources or 'the loss alone'}. The update was skipped: weights and checkpoints are those of step "
            f"{record.step - 1}. Lower lr_schedule.learning_rate, lengthen the warm-up, or look at the data of this step."
        )


class SpikeMonitor(Callback):
    """Logs every step that the spike guard skipped, with the exceeded limit. Too many in a row end the run."""

    def __init__(self) -> None:
        self.limits: tuple[float, ...] = ()

    def step_begin(self, state: RunState) -> None:
        self.limits = state.spikes.limits()

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not record.skipped:
            return
        values = {NORM: record.global_norm, LOSS: record.loss}
        limits = dict(zip(state.spikes.names, self.limits, strict=True))
        exceeded = [
            f"{name} {values[name]:.4g} > {limit:.4g}" for name, limit in limits.items() if values[name] > limit
        ]
        logger.warning(
            "step %d skipped as a spike: %s; %d so far", record.step, ", ".join(exceeded), state.spikes.skipped
        )
        state.spikes.check_consecutive(record.step)

    def end(self, state: RunState) -> None:
        if state.spikes.skipped:
            state.results["skipped"] = f"{state.spikes.skipped} steps as spikes"


class FirstStep(Callback):
    """Logs the start and the duration of the first step of a process, and reports progress in between."""

    first_rank_only = True

    def __init__(self, progress: Progress = unwatched) -> None:
        self.progress = progress
        self.is_done = False

    def step_begin(self, state: RunState) -> None:
        if not self.is_done:
            cache = "; a step compiled by an earlier start is reused" if state.config.context.compile_cache else ""
            logger.info("compiling the training step: a minute for a few layers, longer for many%s", cache)
            self.progress(COMPILING, 0, 1)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not self.is_done:
            self.is_done = True
            self.progress(COMPILING, 1, 1)
            logger.info("compiled and executed step %d in %.1f s", record.step, record.step_time_s)


class SimulationMonitor(Callback):
    """Logs simulated steps, whose values are not computed."""

    def step_end(self, state: RunState, record: StepRecord) -> None:
        logger.info("simulated step %d of %d: %.3f s on the host", record.step, state.last_step, record.step_time_s)


class EvaluationMonitor(Callback):
    """Evaluates held-out text at an interval, at the end, and before training from loaded weights.

    ``writes``: append the results to ``{output_dir}/evaluation.jsonl``.
    """

    def __init__(self, evaluator: Evaluator, eval_step_interval: int, writes: bool = True) -> None:
        self.evaluator = evaluator
        self.writes = writes
        self.eval_step_interval = eval_step_interval
        self.file: MetricsFile | None = None
        self.evaluated_step = -1

    def begin(self, state: RunState) -> None:
        starts_from_weights = bool(state.config.load_checkpoint) and state.step == 0
        if self.writes:
            self.file = MetricsFile(state.output_dir / EVALUATION_NAME)
            self.file.rewind(state.step - starts_from_weights)
        if starts_from_weights:
            self.evaluate(state)
            state.results["held-out before"] = state.results["held-out"]

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if record.step % self.eval_step_interval == 0:
            self.evaluate(state)

    def end(self, state: RunState) -> None:
        if state.step > self.evaluated_step and not state.stop_reason:
            self.evaluate(state)

    def evaluate(self, state: RunState) -> None:
        result = self.evaluator.run(state.engine)
        if self.file is not None:
            self.file.append({"step": state.step, **asdict(result)})
        self.evaluated_step = state.step
        state.results["held-out"] = result.describe()
        logger.info("step %d: held-out %s", state.step, result.describe())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
