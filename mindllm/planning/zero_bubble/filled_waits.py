"""Waits of an order of a V filled with other operations of the stage, from the start of the step and from its end in turn.

An order is done once more through time. A stage whose next operation is not there yet does the first later one that is there,
that the wait has time for, and that leaves memory for those before it (Qi et al., 2024, 2405.15362, section 4: "reordering").
Gradients of weights at the head may let passes go before them as far as memory has room. The same is done with time turned round:
an operation waits for those that need it, and gradients of weights take the memory that forward passes free. So waits at the end
are filled as those at the start. Doing both in turn is forward-backward scheduling of projects (Li and Willis, 1992).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindllm.deadline import check
from mindllm.planning.zero_bubble.folded_costs import B0, B1, F0, F1, W0, W1, FoldedCosts
from mindllm.planning.zero_bubble.operation_order import Kinds

Moments = list[list[list[float]]]  # ends of operations by stage and kind
ROUNDS = 6  # of filling, each from the other end of the step
LATER = (0.0, 0.35)
"""The part of an operation that fills a wait by which the next may become late."""
FIRST = ((), (B0, B1), (F0, F1, B0, B1))
"""Passes that go before gradients of weights."""


def filled(
    costs: FoldedCosts, kinds: Sequence[Kinds], deadline: float = math.inf, goal: float = 0.0
) -> tuple[list[Kinds], int]:
    """The shortest order met in filling waits, and how many operations were timed for it; ends at a step of ``goal``.

    Raises:
        OutOfTime: ``deadline`` passed.
        ValueError: operations of the order wait for each other.
    """
    forwards = _Way.forwards(costs)
    ways = (forwards, forwards.turned())
    best: list[Kinds] = [list(mine) for mine in kinds]
    least, size, effort = _Filling(forwards, best, None).run().step, sum(map(len, kinds)), 0
    start = best
    for later, first, turn in itertools.product(LATER, FIRST, (0, 1)):
        current, same = start, 0
        for number in range(ROUNDS):
            if least <= goal or same == 2:
                break
            check(deadline)
            found, step = ways[(number + turn) % 2].filled(current, later, first)
            same, current, effort = (same + 1 if found == current else 0), found, effort + 2 * size
            if step < least:
                best, least = found, step
    return best, effort


@dataclass(frozen=True)
class _Way:
    """What operations wait for and take as time goes on, or ``back`` from the end.

    Attributes:
        needs: stages and kinds of what an operation waits for, by stage and kind.
        times, changes: what it takes, of time and memory, by kind and stage.
        most: memory by stage.
        delay: of a tensor between stages.
    """

    needs: list[list[list[tuple[int, int]]]]
    times: list[list[float]]
    changes: list[list[float]]
    most: list[float]
    delay: float
    back: bool

    @classmethod
    def forwards(cls, costs: FoldedCosts) -> _Way:
        """Time as it is."""
        needs = [[[need] if need else [] for need in costs.needed(stage)] for stage in range(costs.stages)]
        return cls(needs, costs.durations, costs.changes, (costs.limit * (1 + 1e-12)).tolist(), costs.delay, False)

    def turned(self) -> _Way:
        """Time from the end of the step."""
        needs: list[list[list[tuple[int, int]]]] = [[[] for _ in range(6)] for _ in self.needs]
        for stage, of_stage in enumerate(self.needs):
            for kind, before in enumerate(of_stage):
                for there, what in before:
                    needs[there][what].append((stage, kind))
        changes = [[-change for change in by_stage] for by_stage in self.changes]
        return replace(self, needs=needs, changes=changes, back=not self.back)

    def filled(self, kinds: Sequence[Kinds], later: float, first: Sequence[int]) -> tuple[list[Kinds], float]:
        """The order with waits filled once, and its step."""
        turned = [mine[::-1] for mine in kinds] if self.back else kinds
        line = _Filling(self, turned, None).run()
        line = _Filling(self, turned, line.ends, later, first).run()
        return [mine[::-1] for mine in line.kinds] if self.back else line.kinds, line.step


class _Filling:
    """One pass through time; a stage whose next operation is not there does a later one that is, and that fits the wait.

    Args:
        before: when operations of the order end, by stage and kind; without it no wait is filled.
        later: the part of an operation by which the next may become late.
        first: kinds that go before gradients of weights.
    """

    def __init__(
        self,
        way: _Way,
        kinds: Sequence[Kinds],
        before: Moments | None,
        later: float = 0.0,
        first: Sequence[int] = (),
    ) -> None:
        stages = range(len(kinds))
        self.before, self.later, self.first = before, later, first
        self.times, self.changes, self.most, self.needs, self.delay = (
            way.times,
            way.changes,
            way.most,
            way.needs,
            way.delay,
        )
        self.left = [list(mine) for mine in kinds]
        self.kinds: list[Kinds] = [[] for _ in stages]
        self.ends: Moments = [[[] for _ in range(6)] for _ in stages]
        self.memory, self.free = [0.0 for _ in stages], [0.0 for _ in stages]
        self.events = [(0.0, stage) for stage in stages]

    @property
    def step(self) -> float:
        """The last end."""
        return max(self.free)

    def run(self) -> _Filling:
        """Until all operations are done.

        Raises:
            ValueError: operations wait for each other.
        """
        while self.events:
            now, stage = heapq.heappop(self.events)
            if self.left[stage] and now >= self.free[stage] - 1e-12:
                self._ask(stage, now)
        if any(self.left):
            raise ValueError("the operations of this schedule wait for each other")
        return self

    def _ready(self, stage: int, kind: int) -> float:
        """When what the next operation of a kind needs is there; infinite while that is not known."""
        ready, number = 0.0, len(self.ends[stage][kind])
        for there, what in self.needs[stage][kind]:
            ends = self.ends[there][what]
            if number >= len(ends):
                return math.inf
            ready = max(ready, ends[number] + (self.delay if there != stage else 0.0))
        return ready

    def _ask(self, stage: int, now: float) -> None:
        head = self.left[stage][0]
        ready = self._ready(stage, head)
        if ready <= now + 1e-12:
            self._do(stage, self._sooner(stage, now) if head in (W0, W1) and self.first else 0, now)
            return
        place = None
        if self.before is not None:
            until = ready
            if math.isinf(ready):
                until = self.before[stage][head][len(self.ends[stage][head])] - self.times[head][stage]
            place = self._filler(stage, now, until)
        if place is not None:
            self._do(stage, place, now)
        elif math.isfinite(ready):
            heapq.heappush(self.events, (ready, stage))

    def _sooner(self, stage: int, now: float) -> int:
        """The place of a pass behind gradients of weights at the head, which may wait for it."""
        for place, kind in enumerate(self.left[stage]):
            if kind in (W0, W1):
                continue
            if kind not in self.first or self.memory[stage] + self.changes[kind][stage] > self.most[stage]:
                return 0
            return place if self._ready(stage, kind) <= now + 1e-12 else 0
        return 0

    def _filler(self, stage: int, now: float, until: float) -> int | None:
        """The place of the first later operation that is there, fits the wait and leaves room for those before it."""
        seen: set[int] = set()
        memory = most = self.memory[stage]
        for place, kind in enumerate(self.left[stage]):
            change = self.changes[kind][stage]
            if (
                kind not in seen
                and now + (1 - self.later) * self.times[kind][stage] <= until + 1e-12
                and most + max(change, 0.0) <= self.most[stage]
                and self._ready(stage, kind) <= now + 1e-12
            ):
                return place
            seen.add(kind)
            if len(seen) == 6:
                break
            memory += change
            most = max(most, memory)
        return None

    def _do(self, stage: int, place: int, now: float) -> None:
        kind = self.left[stage].pop(place)
        end = now + self.times[kind][stage]
        self.kinds[stage].append(kind)
        self.ends[stage][kind].append(end)
        self.free[stage] = end
        self.memory[stage] += self.changes[kind][stage]
        for there in range(max(stage - 1, 0), min(stage + 2, len(self.free))):
            when = end + (self.delay if there != stage else 0.0)
            heapq.heappush(self.events, (max(when, self.free[there]), there))
