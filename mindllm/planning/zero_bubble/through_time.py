"""One pass through time: stages are asked what they do at the moments at which they are free or something arrives."""

from __future__ import annotations

import heapq
import itertools
import math

from mindllm.deadline import check
from mindllm.planning.zero_bubble.operation_order import Kinds

LOOK = 512  # operations between two looks at the clock


class ThroughTime:
    """What orders of operations are made with; who derives says in ``_ask`` what a stage does.

    Attributes:
        micro: micro-batches.
        kinds: what every stage has done, in its order.
        done: how often it has done each kind.
        free: when it has done the last.
        events: moments and the stages that are asked then, a heap.
    """

    micro: int
    kinds: list[Kinds]
    done: list[list[int]]
    free: list[float]
    events: list[tuple[float, int]]

    def run(self, deadline: float = math.inf) -> list[Kinds] | None:
        """The kinds of operations of every stage, or None when memory does not let them all be done.

        Raises:
            OutOfTime: they were not all scheduled at ``deadline``.
        """
        for number in itertools.count():
            if not self.events:
                break
            if number % LOOK == 0:
                check(deadline)
            now, stage = heapq.heappop(self.events)
            if now >= self.free[stage] - 1e-12:
                self._ask(stage, now)
        return self.kinds if all(done == [self.micro] * len(done) for done in self.done) else None

    def _ask(self, stage: int, now: float) -> None:
        """Begin an operation, or ask again later."""
        raise NotImplementedError
