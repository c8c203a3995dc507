"""Exact planning with one chunk per stage, by dynamic programming over runs of layers.

With f, b the forward and backward time of a stage, t = f + b, A the sum of all t, S the sum of t of the stages behind a stage, w
the number of those stages and m micro-batches, every operation of 1F1B depends on what ended in the slot before. Chains of
operations that leave out no slot visit forward and backward passes of a stage equally often, which leaves one longest chain per
stage; the others leave out slots of the warm-up or the cool-down. The step is at least each of, for every stage:

    A + S + (m - 1 - w) t      to the last stage, back to this one until its forward passes end, to the last and back
    A + (m - 1) f + (m - 1 - w) b      all forward passes of the warm-up here
    A + (m - 1 - w) f + (m - 1) b      all backward passes of the cool-down here
    P + m t      P the sum of t of the stages before: nothing but this stage

With U a bound of all but A in the first three, the least A for U is found from the last stage to the first: a smaller S is better
for A and for every bound, so one number per run of layers suffices. In the fourth the least possible P is taken. The least A + U
is then a lower bound, and the plan that has it is simulated: nearly always its step is that bound, which proves it optimal.
GPipe has only A + (m - 1)(max f + max b).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from toolkit.pipeline_balance.plan import Plan, end_of, room_for, tail_working
from toolkit.pipeline_balance.problem import Problem
from toolkit.pipeline_balance.recompute_mix import Mixes, Runs
from toolkit.pipeline_balance.schedule import alive

HUGE = 1e200  # in place of infinity where it would be multiplied by zero


class StageTable:
    """Forward and least backward time of each stage for each run of layers; infinite where memory does not suffice."""

    def __init__(self, problem: Problem, mixes: Mixes, held: np.ndarray, longest: int) -> None:
        """``held``: micro-batches whose activations each stage keeps, ``[stages]``; ``longest``: layers of a stage at most."""
        self.problem, self.mixes, self.held = problem, mixes, held
        self.longest = min(longest, problem.layer_count - problem.stages + 1)
        self._runs: dict[Runs, int] = {}
        layers = problem.layer_count
        self.run_of = np.full((layers, self.longest), -1)
        for start in range(layers):
            for count in range(1, min(self.longest, layers - start) + 1):
                self.run_of[start, count - 1] = self._runs.setdefault(mixes.runs(start, count), len(self._runs))

    @cached_property
    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward times, ``[stages, layers, longest]``: of ``count`` layers from one on at ``[.., count - 1]``."""
        by_run = np.array([
            [self._times(stage, runs) for runs in self._runs] + [(np.inf, np.inf)] for stage in range(self.problem.stages)
        ])  # fmt: skip
        both = by_run[:, self.run_of]
        return both[..., 0], both[..., 1]

    def _times(self, stage: int, runs: Runs) -> tuple[float, float]:
        found = self._best(stage, runs)
        forward = sum(self.problem.layers[kind].forward * count for kind, count in runs)
        ends = end_of(self.problem, stage)
        if found is None:
            return np.inf, np.inf
        return forward + sum(end.forward for end in ends), found[0] + sum(end.backward for end in ends)

    def _best(self, stage: int, runs: Runs) -> tuple[float, np.ndarray] | None:
        """Least backward time of the layers, and the counts of the mix."""
        problem, held = self.problem, int(self.held[stage])
        ends = end_of(problem, stage)
        room = room_for(problem, stage, runs) - held * sum(end.activation_mb for end in ends)
        return self.mixes.fastest(runs, held, room, tail_working(problem, stage))

    def plan(self, counts: list[int]) -> Plan:
        """The plan with these layers per stage and the least backward times."""
        places, start = [], 0
        for stage, count in enumerate(counts):
            runs = self.mixes.runs(start, count)
            found = self._best(stage, runs)
            if found is None:
                raise ValueError(f"stage {stage} cannot hold {count} layers")
            places.append(tuple(self.mixes.written(runs, found[1])))
            start += count
        return Plan(tuple(places))


@dataclass(frozen=True)
class Relaxed:
    """Layers per stage with the least value of the bounds, and that value."""

    counts: list[int]
    value: float


class OneChunk:
    """The dynamic programme of one problem."""

    def __init__(self, problem: Problem, table: StageTable) -> None:
        self.problem, self.table = problem, table
        self.forward, self.backward = table.times
        self.total = self.forward + self.backward
        self.stages, self.micro = problem.stages, problem.micro_batches
        self.delay = problem.point_to_point
        behind = self.stages - 1 - np.arange(self.stages)
        self.behind = behind
        self.loops = np.maximum(0, self.micro - 1 - behind)
        self.base = 2 * (self.stages - 1) * self.delay
        counts = np.arange(1, table.longest + 1)
        self.next = np.minimum(np.arange(problem.layer_count)[:, None] + counts, problem.layer_count)

    @cached_property
    def caps(self) -> np.ndarray:
        """What a choice alone asks of U, ``[stages, layers, longest]``."""
        more, loops = self.micro - 1, self.loops[:, None, None]
        forward, backward = (np.minimum(times, HUGE) for times in (self.forward, self.backward))
        return np.maximum(more * forward + loops * backward, loops * forward + more * backward)

    def decide(self, target: float) -> Relaxed | None:
        """A plan whose bounds are all at most ``target``, or None: then every plan's step is longer."""
        first = self._first_sums(target)
        allowed = (
            self.micro * self.total + first[:-1, :, None]
            <= target - 2 * self.delay * np.arange(self.stages)[:, None, None]
        )
        room = math.inf
        while True:
            sums, chosen = self._last_sums(allowed, room)
            least = sums[0, 0]
            if not math.isfinite(least):
                return None
            left = target - self.base - least
            if left >= room * (1 - 1e-13):
                return Relaxed(self._counts(chosen), least + self.base + room)
            room = left

    def _first_sums(self, target: float) -> np.ndarray:
        """Least sum of t of the stages before, by the layers they hold, ``[stages + 1, layers]``."""
        layers = self.problem.layer_count
        sums = np.full((self.stages + 1, layers + 1), np.inf)
        sums[0, 0] = 0
        for stage in range(self.stages):
            value = sums[stage, :layers, None] + self.total[stage]
            late = self.micro * self.total[stage] + sums[stage, :layers, None] > target
            value[late] = np.inf
            for count in range(self.table.longest):  # value[start, count] reaches start + count + 1
                ends = slice(count + 1, layers + 1)
                np.minimum(sums[stage + 1, ends], value[: layers - count, count], out=sums[stage + 1, ends])
        return sums[:, :layers]

    def _last_sums(self, allowed: np.ndarray, room: float) -> tuple[np.ndarray, np.ndarray]:
        """Least sum of t from a stage to the last, by the first layer of that stage, and the layers it takes for it."""
        layers = self.problem.layer_count
        sums = np.full((self.stages + 1, layers + 1), np.inf)
        chosen = np.zeros((self.stages, layers), int)
        sums[self.stages, layers] = 0
        for stage in reversed(range(self.stages)):
            after = sums[stage + 1][self.next]
            value = after + self.total[stage]
            bad = ~allowed[stage] | (self.caps[stage] > room)
            bad |= self._late(stage, after, room)
            value[bad] = np.inf
            chosen[stage] = value.argmin(axis=1)
            sums[stage, :layers] = value.min(axis=1)
        return sums, chosen

    def _late(self, stage: int, after: np.ndarray, room: float) -> np.ndarray:
        """Whether a chain to the last stage and back, once or as often as there is time, asks for more than ``room``."""
        behind, total = int(self.behind[stage]), np.minimum(self.total[stage], HUGE)
        if behind == 0:
            return (self.micro - 1) * total > room
        most = (self.micro - 1) // (behind + 1)
        late = np.zeros(total.shape, bool)
        for times in {1, most} if self.delay else {1}:
            if 1 <= times <= most:
                loops = self.micro - 1 - times * (behind + 1)
                late |= times * (after + total + 2 * behind * self.delay) + loops * total > room
        return late

    def _counts(self, chosen: np.ndarray) -> list[int]:
        counts, start = [], 0
        for stage in range(self.stages):
            counts.append(int(chosen[stage, start]) + 1)
            start += counts[-1]
        return counts


class GPipe(OneChunk):
    """All forward passes, then all backward passes."""

    def decide(self, target: float) -> Relaxed | None:
        """As :meth:`OneChunk.decide`, trying every longest forward pass."""
        for longest in np.unique(self.forward[np.isfinite(self.forward)]):
            found = self._decide_with(target, float(longest))
            if found is not None:
                return found
        return None

    def _decide_with(self, target: float, longest: float) -> Relaxed | None:
        more = self.micro - 1
        room = math.inf
        while True:
            self._room_of_forward = more * longest
            sums, chosen = self._last_sums(self.forward <= longest, room)
            least = sums[0, 0]
            if not math.isfinite(least):
                return None
            left = target - self.base - least
            if left >= room * (1 - 1e-13):
                return Relaxed(self._counts(chosen), least + self.base + room)
            room = left

    @cached_property
    def caps(self) -> np.ndarray:
        """What the backward pass of a choice asks of U."""
        return (self.micro - 1) * self.backward

    def _late(self, stage: int, after: np.ndarray, room: float) -> np.ndarray:
        return self.caps[stage] + self._room_of_forward > room


def held_micro_batches(problem: Problem, orders: tuple) -> np.ndarray:
    """Micro-batches alive at once on each stage, ``[stages]``."""
    return np.array([vectors.max() for vectors in alive(orders, 1)])
