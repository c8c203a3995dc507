"""The training loop: batches in, records out, callbacks told; stops cleanly when asked to.

The time that every rank works on a step tells who is slow: one slow device makes all the others wait.

Batches are made one ahead of the step: where one cannot be made, all ranks stop after the same step and save.
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
from mindllm.train.job.ranks import ALONE, Ranks
from mindllm.train.state import RunState, StepRecord
from mindllm.train.utilisation import Peak

DATA_FAILED = "data"
Batch = Mapping[str, np.ndarray]
STEPS_IN_A_ROW = 3  # one late step says nothing: a checkpoint, a neighbour on the machine
REPEATED_EVERY = 100
logger = logging.getLogger(__name__)


class BatchAhead:
    """Takes batches from ``source``; an error while one is made waits until the run has saved what it has."""

    def __init__(self, source: Iterator[Batch]) -> None:
        self._source = source
        self._next: Batch | None = None
        self.seconds = 0.0  # that the batch which is ready was waited for
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
        start = time.perf_counter()
        try:
            self._next = next(self._source, None)
        except Exception as error:
            self._error = error
        self.seconds = time.perf_counter() - start

    def raise_failed(self, ranks: list[int]) -> None:
        """Raises what kept the run from its next batch: the error, or which of the other ``ranks`` had one."""
        if self._error is not None:
            raise self._error
        raise RunFailed(f"{list_ranks(ranks)} could not make the next batch; the log of that rank says why")


@dataclass(frozen=True)
class Slowest:
    """The rank that worked longest on a step, its seconds, and the median's."""

    rank: int
    seconds: float
    median: float


class StepTimes:
    """Compares the ranks' own seconds after each step, and warns of one that is slow ``STEPS_IN_A_ROW`` times."""

    def __init__(self, ranks: Ranks, factor: float) -> None:
        self.ranks = ranks
        self.factor = factor
        self._slow_steps: tuple[int, int] = (-1, 0)

    def compare(self, step: int, seconds: float) -> Slowest:
        """Called by all ranks: ``seconds`` without those in which this rank waited for others.

        In a simulation there are no others to compare with.
        """
        if self.ranks.simulated:
            return Slowest(self.ranks.rank, seconds, seconds)
        own = [seconds if rank == self.ranks.rank else 0.0 for rank in range(self.ranks.count)]
        times = self.ranks.sum(own)
        slowest = max(range(len(times)), key=times.__getitem__)
        found = Slowest(slowest, times[slowest], statistics.median_low(times))
        self._warn(step, found)
        return found

    def _warn(self, step: int, found: Slowest) -> None:
        if found.seconds <= self.factor * found.median:
            self._slow_steps = (-1, 0)
            return
        rank, count = self._slow_steps
        self._slow_steps = (found.rank, count + 1 if rank == found.rank else 1)
        if self.ranks.is_first and self._slow_steps[1] % REPEATED_EVERY == STEPS_IN_A_ROW:
            logger.warning(
                "rank %d is slow: step %d took it %.3f s, the median of all ranks is %.3f s; look at its device, its "
                "host and its log",
                found.rank,
                step,
                found.seconds,
                found.median,
            )


class Trainer:
    """Runs steps ``state.step + 1`` to ``state.last_step``."""

    def __init__(
        self,
        state: RunState,
        stream: BatchStream,
        learning_rate: Callable[[int], float],
        callbacks: Sequence[Callback],
        peak: Peak,
        ranks: Ranks = ALONE,
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
        self.sound = False  # whether the state of the run is that after its last step
        self.flops_per_token = state.config.flops_per_token()

    def run(self) -> None:
        """Trains to the end, or until SIGTERM or SIGINT; whatever happens, callbacks are closed."""
        with StopSignals() as self.signals:
            try:
                self._tell("begin")
                batches = BatchAhead(self.stream.iterate(self.state.step, self.state.last_step))
                while (batch := batches.take()) is not None:
                    self._one_step(batch, batches.seconds)
                    batches.fetch()
                    self.state.stop_reason = self.ranks.agree(batches.problem or self.signals.asked, STOP_REASONS)
                    if self.state.stop_reason:
                        logger.info("stopping after step %d: %s", self.state.step, self.state.stop_reason)
                        break
                self._tell("end")
                if self.state.stop_reason == DATA_FAILED:
                    batches.raise_failed(self.ranks.which(bool(batches.problem)))
            except Exception:
                self._rescue()
                raise
            finally:
                for callback in self.callbacks:
                    callback.close()

    def _one_step(self, batch: Batch, waited: float) -> None:
        state = self.state
        self._tell("step_begin")
        heart.beat(f"step {state.step + 1}")
        rate, scale = self.learning_rate(state.step), state.scaler.value
        start = time.perf_counter()
        self.sound = False
        limits = state.spikes.limits()
        result = state.engine.step(batch, rate, scale, limits, self.group_rates(state.step))
        seconds = time.perf_counter() - start
        self.signals.step_done()
        state.batch = batch
        state.step += 1
        state.scaler.update(result.overflow)
        state.spikes.update(result.loss, result.global_norm, result.overflow, result.skipped)
        slowest = self.step_times.compare(state.step, seconds - result.waited)
        state.counted_steps += 1
        state.overflows += result.overflow
        record = self._record(result, rate, scale, seconds, slowest, waited)
        self.sound = not result.overflow
        for callback in self.callbacks:
            heart.beat(type(callback).__name__, state.step)
            callback.step_end(state, record)
        heart.beat("the next batch", state.step)

    def _rescue(self) -> None:
        """Saves what an error would lose, where it came between two steps and no other rank would have to take part."""
        if not self.sound or self.ranks.count > 1:
            return
        try:
            self._tell("rescue")
        except Exception:
            logger.exception("nothing could be saved after the error that follows")

    def _record(
        self, result: StepResult, rate: float, scale: float, seconds: float, slowest: Slowest, waited: float
    ) -> StepRecord:
        config = self.state.config
        devices = config.parallel_config.device_num
        positions = config.global_batch_size * config.model.config.seq_length
        work = positions * self.flops_per_token / seconds / devices
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
            tflops=work / 1e12,
            mfu=self.peak.share(work),
            slowest_rank=slowest.rank,
            slowest_rank_time_s=slowest.seconds,
            skipped=result.skipped,
            overflow_share=self.state.overflows / self.state.counted_steps,
            data_wait_s=waited,
        )

    def _tell(self, moment: str) -> None:
        for callback in self.callbacks:
            heart.beat(f"{type(callback).__name__}.{moment}", self.state.step)
            getattr(callback, moment)(self.state)


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_REASONS = (DATA_FAILED, *(item.name for item in STOPPING))


class StopSignals:
    """While open, SIGTERM, SIGHUP and SIGINT let the step in progress finish and then end the run.

    The first step, which compiles, has some seconds for that (:mod:`mindllm.process.interrupts`). A second SIGINT ends it at
    once. ``asked`` is the name of the signal that came, or empty.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        found = {number: signal.getsignal(number) for number in STOPPING}
        ignored = [signal.SIGHUP] * (found[signal.SIGHUP] == signal.SIG_IGN)  # under nohup
        self.previous = {number: handler for number, handler in found.items() if number not in ignored}
        nothing_to_save(True)
        self._install()
        return self

    def step_done(self) -> None:
        """There is something to save; and MindSpore's runtime has replaced the handler of SIGINT by one that sends SIGTERM."""
        nothing_to_save(False)
        self._install()

    def _install(self) -> None:
        for number in self.previous:
            signal.signal(number, self._stop)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        nothing_to_save(False)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
