"""Training loop. Notifies callbacks after each step and stops cleanly on SIGINT, SIGTERM and SIGHUP.

Batches are prefetched by one step. If a batch cannot be made, all ranks stop after the same step and save.
"""

from __future__ import annotations

import logging
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import numpy as np

from mindllm.data import BatchStream
from mindllm.errors import RunFailed
from mindllm.launch.heartbeat import heart
from mindllm.process.interrupts import nothing_to_save
from mindllm.train.callbacks import Callback
from mindllm.train.checkpoint.joint import list_ranks
from mindllm.train.engine import StepResult
from mindllm.train.job.ranks import SINGLE_RANK, Ranks
from mindllm.train.state import RunState, StepRecord
from mindllm.train.utilization import Peak

DATA_FAILED = "data"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_REASONS = (DATA_FAILED, *(item.name for item in STOP_SIGNALS))
SLOW_STEPS = 3  # a single slow step is noise (checkpointing, a noisy neighbor)
WARNING_INTERVAL = 100  # slow steps between two warnings about the same rank
Batch = Mapping[str, np.ndarray]
logger = logging.getLogger(__name__)


class Prefetch:
    """Fetches batches from ``source`` one step ahead. An error is raised only after the run has saved its state."""

    def __init__(self, source: Iterator[Batch]) -> None:
        self._source = source
        self._next: Batch | None = None
        self._error: Exception | None = None
        self.seconds = 0.0  # time spent waiting for the batch that is ready
        self.fetch()
        if self._error is not None:  # there is nothing to save before the first step
            raise self._error

    @property
    def problem(self) -> str:
        """``DATA_FAILED`` if the next batch could not be made, otherwise empty."""
        return DATA_FAILED if self._error is not None else ""

    def take(self) -> Batch | None:
        """Return the batch of the next step; None after the last one."""
        batch, self._next = self._next, None
        return batch

    def fetch(self) -> None:
        """Make the next batch ready."""
        start = time.perf_counter()
        try:
            self._next = next(self._source, None)
        except Exception as error:
            self._error = error
        self.seconds = time.perf_counter() - start

    def raise_error(self, ranks: list[int]) -> None:
        """Raise the error of this rank, or name the ``ranks`` whose batch failed.

        Raises:
            RunFailed: the batch of another rank failed.
        """
        if self._error is not None:
            raise self._error
        raise RunFailed(f"{list_ranks(ranks)} could not make the next batch; see the log of that rank")


@dataclass(frozen=True)
class SlowestRank:
    """The rank that worked longest on a step, its seconds, and the median over all ranks."""

    rank: int
    seconds: float
    median: float


class StepTimes:
    """Compares the step times of all ranks, and warns if one rank is slow ``SLOW_STEPS`` times in a row.

    One slow device makes all others wait, so times exclude the time spent waiting for other ranks.
    """

    def __init__(self, ranks: Ranks, factor: float) -> None:
        self.ranks = ranks
        self.factor = factor
        self._slow_rank, self._slow_steps = -1, 0

    def compare(self, step: int, seconds: float) -> SlowestRank:
        """Return the slowest rank. All ranks call it with their own ``seconds``; a simulated rank compares with itself."""
        if self.ranks.simulated:
            return SlowestRank(self.ranks.rank, seconds, seconds)
        times = self.ranks.gather(seconds)
        rank = max(range(len(times)), key=times.__getitem__)
        slowest = SlowestRank(rank, times[rank], statistics.median_low(times))
        self._warn_if_slow(step, slowest)
        return slowest

    def _warn_if_slow(self, step: int, slowest: SlowestRank) -> None:
        if slowest.seconds <= self.factor * slowest.median:
            self._slow_rank, self._slow_steps = -1, 0
            return
        self._slow_steps = self._slow_steps + 1 if self._slow_rank == slowest.rank else 1
        self._slow_rank = slowest.rank
        if self.ranks.is_first and self._slow_steps % WARNING_INTERVAL == SLOW_STEPS:
            logger.warning(
                "rank %d is slow: step %d took %.3f s, median of all ranks %.3f s; check its device, host and log",
                slowest.rank,
                step,
                slowest.seconds,
                slowest.median,
            )


class Trainer:
    """Runs steps ``state.step + 1`` to ``state.last_step``.

    Args:
        state: the run before its first step.
        stream: batches by step.
        learning_rate: the learning rate of a step, counted from 0.
        callbacks: notified in this order.
        peak: peak FLOP/s of a device.
        ranks: the processes of the run.
        group_rates: learning rates of the weight groups in a step.
    """

    def __init__(
        self,
        state: RunState,
        stream: BatchStream,
        learning_rate: Callable[[int], float],
        callbacks: Sequence[Callback],
        peak: Peak,
        ranks: Ranks = SINGLE_RANK,
        group_rates: Callable[[int], tuple[float, ...]] | None = None,
    ) -> None:
        self.group_rates = group_rates or (lambda step: ())
        self.state = state
        self.stream = stream
        self.learning_rate = learning_rate
        self.callbacks = callbacks
        self.peak = peak
        self.ranks = ranks
        self.step_times = StepTimes(ranks, state.config.runner_config.slow_rank_factor)
        self.is_consistent = False  # weights, optimizer and data position belong to the same step
        self.flops_per_token = state.config.flops_per_token()

    def run(self) -> None:
        """Train to the last step, or until a stop signal. Callbacks are always closed.

        Raises:
            RunFailed: a batch of another rank failed, or a callback ended the run.
        """
        with StopSignals() as self.signals:
            try:
                self._notify("begin")
                batches = Prefetch(self.stream.iterate(self.state.step, self.state.last_step))
                while (batch := batches.take()) is not None:
                    self._train_step(batch, batches.seconds)
                    batches.fetch()
                    # All ranks must stop after the same step, so they agree on the reason.
                    self.state.stop_reason = self.ranks.agree(batches.problem or self.signals.received, STOP_REASONS)
                    if self.state.stop_reason:
                        logger.info("stopping after step %d: %s", self.state.step, self.state.stop_reason)
                        break
                self._notify("end")
                if self.state.stop_reason == DATA_FAILED:
                    batches.raise_error(self.ranks.ranks_where(bool(batches.problem)))
            except Exception:
                self._rescue()
                raise
            finally:
                for callback in self.callbacks:
                    callback.close()

    def _train_step(self, batch: Batch, data_wait: float) -> None:
        state = self.state
        self._notify("step_begin")
        heart.beat(f"step {state.step + 1}")
        rate, scale = self.learning_rate(state.step), state.scaler.value
        limits = state.spikes.limits()
        self.is_consistent = False
        start = time.perf_counter()
        result = state.engine.step(batch, rate, scale, limits, self.group_rates(state.step))
        seconds = time.perf_counter() - start
        self.signals.on_step_end()
        state.batch = batch
        state.step += 1
        state.scaler.update(result.overflow)
        state.spikes.update(result.loss, result.global_norm, result.overflow, result.skipped)
        slowest = self.step_times.compare(state.step, seconds - result.waited)
        state.counted_steps += 1
        state.overflows += result.overflow
        record = self._make_record(result, rate, scale, seconds, slowest, data_wait)
        self.is_consistent = not result.overflow
        for callback in self.callbacks:
            heart.beat(type(callback).__name__, state.step)
            callback.step_end(state, record)
        heart.beat("the next batch", state.step)

    def _rescue(self) -> None:
        """Save the state after an error between two steps. With several ranks, the others could not take part."""
        if not self.is_consistent or self.ranks.count > 1:
            return
        try:
            self._notify("rescue")
        except Exception:
            logger.exception("nothing could be saved after the following error")

    def _make_record(
        self, result: StepResult, rate: float, scale: float, seconds: float, slowest: SlowestRank, data_wait: float
    ) -> StepRecord:
        config = self.state.config
        devices = config.parallel_config.device_num
        positions = config.global_batch_size * config.model.config.seq_length
        flops_per_second = positions * self.flops_per_token / seconds / devices
        return StepRecord(
            step=self.state.step,
            epoch=self.state.place_in_epoch(self.state.step)[0],
            loss=result.loss,
            learning_rate=rate,
            global_norm=result.global_norm,
            overflow=result.overflow,
            loss_scale=scale,
            tokens=result.tokens,
            step_time_s=seconds,
            tokens_per_s=positions / seconds,
            tokens_per_s_per_device=positions / seconds / devices,
            samples_per_s_per_device=config.global_batch_size / seconds / devices,
            tflops=flops_per_second / 1e12,
            mfu=self.peak.share(flops_per_second),
            slowest_rank=slowest.rank,
            slowest_rank_time_s=slowest.seconds,
            skipped=result.skipped,
            overflow_share=self.state.overflows / self.state.counted_steps,
            data_wait_s=data_wait,
        )

    def _notify(self, event: str) -> None:
        for callback in self.callbacks:
            heart.beat(f"{type(callback).__name__}.{event}", self.state.step)
            getattr(callback, event)(self.state)


class StopSignals:
    """Context in which SIGTERM, SIGHUP and SIGINT end the run after the step in progress.

    The first step, which compiles, gets a few seconds (:mod:`mindllm.process.interrupts`). A second SIGINT interrupts
    immediately. ``received`` is the name of the signal, or empty.
    """

    def __init__(self) -> None:
        self.received = ""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        handlers: dict[int, object] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        if handlers[signal.SIGHUP] == signal.SIG_IGN:  # started with nohup
            del handlers[signal.SIGHUP]
        self._previous = handlers
        nothing_to_save(True)
        self._install()
        return self

    def on_step_end(self) -> None:
        """Note that there is a state to save, and restore the handlers: MindSpore's runtime replaces that of SIGINT."""
        nothing_to_save(False)
        self._install()

    def _install(self) -> None:
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        nothing_to_save(False)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
