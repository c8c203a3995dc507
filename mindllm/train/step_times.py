"""The time every rank works on a step, and who is slow: one slow device makes all the others wait."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass

from mindllm.train.job.ranks import Ranks

STEPS_IN_A_ROW = 3  # one late step says nothing: a checkpoint, a neighbour on the machine
REPEATED_EVERY = 100
logger = logging.getLogger(__name__)


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
