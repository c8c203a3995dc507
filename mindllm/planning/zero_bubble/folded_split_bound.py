"""A lower bound of every plan of a V within a memory limit: any split, any recomputation, any order.

A stage holds a run of layers from the front of the model and one from its back, so a dynamic program over the layers that the
stages so far have taken from both ends finds the split whose slowest stage asks for least. What a stage asks for is that of
``folded_bound.py``, with the quickest recomputation on all other stages. On its own it takes the best of its mixes; those of a
run are divided into a few groups, each with the least memory and the least time of its mixes. Both only lower the bound: a stage
asks for no less where it keeps more or computes longer, as no more micro-batches are under way than there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.deadline import OutOfTime, check, now
from mindllm.planning.plan import fixed_memory
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Front, Mixes
from mindllm.planning.zero_bubble.folded_costs import DOWN, UP

GROUPS = 4  # of mixes of a run of layers
SHARE = 0.25  # of the time
MOST = 1e200  # MB, instead of infinity, which times zero is no number


def folded_split_bound(problem: Problem, mixes: Mixes, limit: float, deadline: float = math.inf) -> float:
    """A makespan that no plan is shorter than, up to ``limit``; infinite where no plan keeps to that, 0 where time was short."""
    if math.isfinite(deadline):
        deadline = now() + SHARE * (deadline - now())
    try:
        return _Program(problem, mixes, limit, deadline).solved()
    except OutOfTime:
        return 0.0


@dataclass(frozen=True)
class _Runs:
    """Groups of mixes of the run of ``count`` layers that begins at each layer of the model, ``[layers, groups]``.

    Attributes:
        held: MB of a micro-batch.
        working: MB that a backward pass needs beyond that.
        total: time of both halves of a backward pass.
    """

    held: np.ndarray
    working: np.ndarray
    total: np.ndarray


class _Program:
    def __init__(self, problem: Problem, mixes: Mixes, limit: float, deadline: float) -> None:
        self.problem, self.mixes, self.limit, self.deadline = problem, mixes, limit, deadline
        self.layers, self.stages, self.micro = problem.layer_count, problem.stages, problem.micro_batches
        order = [problem.layers[index] for index in problem.layer_order]
        quickest = [min(cost.backward for cost in layer.kinds.values()) for layer in order]
        self.forward = _sums([layer.forward for layer in order])
        self.quick = _sums(quickest)
        self.weight = _sums([layer.weight_gradient for layer in order])
        self.inputs = self.quick - self.weight
        self.memory = _sums([layer.parameter_mb for layer in order]), _sums([layer.start_mb for layer in order])
        self.again = _least_again(problem)
        self._runs: dict[int, _Runs] = {}

    def solved(self) -> float:
        """The least that the slowest stage asks for."""
        best = np.full((self.layers + 1, self.layers + 1), np.inf)
        best[0, 0] = 0.0
        for stage in range(self.stages):
            after = np.full_like(best, np.inf)
            for front, back in self._sizes(stage):
                check(self.deadline)
                self._taken(stage, front, back, best, after)
            best = after
        last = best[np.arange(self.layers + 1), self.layers - np.arange(self.layers + 1)]
        return float(last.min())

    def _sizes(self, stage: int) -> list[tuple[int, int]]:
        """Layers that a stage may take from both ends, so that it is done in time and others have some."""
        most = self.layers - 2 * (self.stages - 1)
        lightest = float(np.min(np.diff(self.forward + self.quick)))
        if math.isfinite(self.limit) and lightest > 0:
            most = min(most, math.floor(self.limit * (1 + 1e-9) / (self.micro * lightest)))
        return [(front, back) for front in range(1, most) for back in range(1, most - front + 1)]

    def _taken(self, stage: int, front: int, back: int, best: np.ndarray, after: np.ndarray) -> None:
        """Takes so many layers from both ends; ``best`` by layers taken before from the front and the back, and ``after``."""
        others, last = 2 * (self.stages - 1 - stage), stage == self.stages - 1
        first, end = np.nonzero(np.isfinite(best))
        left = self.layers - first - end - front - back
        fits = left == 0 if last else left >= others
        first, end = first[fits], end[fits]
        if not len(first):
            return
        asked = self._asked(stage, first, front, end, back)
        value = np.maximum(best[first, end], np.where(asked <= self.limit * (1 + 1e-9), asked, np.inf))
        np.minimum.at(after, (first + front, end + back), value)

    def _asked(self, stage: int, first: np.ndarray, front: int, end: np.ndarray, back: int) -> np.ndarray:
        """What the stage asks for at least in each of these positions, ``[positions]``."""
        problem, delay, micro = self.problem, self.problem.point_to_point, self.micro
        behind = self.layers - end  # where the layers begin that were taken from the back
        down, up = self._groups(front), self._groups(back)
        head, tail = problem.head, problem.tail
        own = stage == 0
        held = [
            down.held[first][:, :, None] + own * head.activation_mb,
            up.held[behind - back][:, None, :] + own * tail.activation_mb,
        ]
        total = [
            down.total[first][:, :, None] + own * head.backward,
            up.total[behind - back][:, None, :] + own * tail.backward,
        ]
        times = [
            (self.forward[first + front] - self.forward[first] + own * head.forward)[:, None, None],
            (self.forward[behind] - self.forward[behind - back] + own * tail.forward)[:, None, None],
        ]
        weight = [
            (self.weight[first + front] - self.weight[first] + own * head.weight_gradient)[:, None, None],
            (self.weight[behind] - self.weight[behind - back] + own * tail.weight_gradient)[:, None, None],
        ]
        room = self._room(stage, first, front, behind, back)[:, None, None]
        both = held[DOWN] + held[UP]
        workings = down.working[first][:, :, None], up.working[behind - back][:, None, :]
        possible = both + workings[UP] <= room * (1 + 1e-9) + 1e-9
        room = np.maximum(room - np.minimum(*workings), 0.0) * (1 + 1e-9)

        before = stage * delay
        arrives = (self.forward[first] + (not own) * head.forward + before)[:, None, None]
        all_inputs = self.inputs[-1] + head.backward - head.weight_gradient + tail.backward - tail.weight_gradient
        returned = self.inputs[-1] - self.inputs[behind] + (not own) * (tail.backward - tail.weight_gradient)
        passed = self.forward[-1] - self.forward[behind] + (not own) * tail.forward
        turns = self.forward[-1] + head.forward + tail.forward + returned + (2 * (self.stages - 1) + stage) * delay
        way = passed + all_inputs + self.weight[1] + head.weight_gradient + (stage + 2 * (self.stages - 1)) * delay
        early = np.maximum(0.0, turns[:, None, None] - _most(times, held, room, micro))
        late = np.maximum(0.0, way[:, None, None] - _most(total, held, room, micro))
        waits = np.where(micro * both > room, early + late, np.maximum(early, late))
        work = micro * (times[DOWN] + times[UP] + total[DOWN] + total[UP])
        found = np.maximum(
            work + np.maximum(arrives, waits), arrives + self._kept(stage, first, behind, back, held, weight, room)
        )
        return np.where(possible, found, np.inf).min(axis=(1, 2))

    def _kept(
        self, stage: int, first: np.ndarray, behind: np.ndarray, back: int, held: Sequence[np.ndarray],
        weight: Sequence[np.ndarray], room: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """The time in which memory has room for all micro-batches, each kept for its way from the stage and back."""
        problem, delay, start = self.problem, self.problem.point_to_point, behind - back
        tail, head, own = problem.tail, problem.head, stage == 0
        ends = tail.forward + tail.backward - tail.weight_gradient
        up = self.forward[-1] - self.forward[start] + self.inputs[-1] - self.inputs[start] + ends + 2 * stage * delay
        down = self.forward[-1] - self.forward[first] + self.inputs[-1] - self.inputs[first] + ends
        down = down + own * (head.forward + head.backward - head.weight_gradient)
        down = down + (2 * (self.stages - 1 - stage) + 2 * (self.stages - 1)) * delay
        kept = held[UP] * (up[:, None, None] + weight[UP]) + held[DOWN] * (down[:, None, None] + weight[DOWN])
        return self.micro * kept / np.maximum(room, 1e-300)

    def _room(self, stage: int, first: np.ndarray, front: int, behind: np.ndarray, back: int) -> np.ndarray:
        """MB that activations and working memory may take in each position."""
        limit = self.problem.per_stage("limit_mb")[stage]
        fixed, start, update = fixed_memory(self.problem, stage, [])
        parameter, more = (
            sums[first + front] - sums[first] + sums[behind] - sums[behind - back] for sums in self.memory
        )
        outside = parameter + np.maximum(start + more, update)
        return np.where(outside <= limit + 1e-9, min(limit, MOST) - fixed - parameter, -MOST)

    def _groups(self, count: int) -> _Runs:
        if count not in self._runs:
            rows = [self._of_run(start, count) for start in range(self.layers - count + 1)]
            self._runs[count] = _Runs(*(np.array(part) for part in zip(*rows, strict=True)))
        return self._runs[count]

    def _of_run(self, start: int, count: int) -> tuple[np.ndarray, ...]:
        check(self.deadline)
        return _grouped(
            self.mixes.front(self.mixes.runs(start, count)), self.quick[start + count] - self.quick[start], self.again
        )


def _grouped(front: Front, quickest: float, again: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least memory, working memory and time of each of :data:`GROUPS` of the mixes of a front."""
    total = front.backward + again * np.maximum(front.backward - quickest, 0.0)
    parts = np.array_split(np.arange(len(total)), GROUPS)
    rows = [part if len(part) else parts[0] for part in parts]
    activation, working, time = (
        np.array([values[row].min() for row in rows]) for values in (front.activation, front.working, total)
    )
    return activation, working, time


def _least_again(problem: Problem) -> float:
    """The least that kinds compute again in the other half of a backward pass, as a share of what the first takes longer."""
    shares = [1.0]
    for layer, again in zip(problem.layers, problem.again, strict=True):
        quickest = min(cost.backward for cost in layer.kinds.values())
        for name, cost in layer.kinds.items():
            if cost.backward > quickest:
                shares.append(float(again[problem.kind_names.index(name)]) / (cost.backward - quickest))
    return min(shares)


def _most(times: Sequence[np.ndarray], held: Sequence[np.ndarray], room: np.ndarray, micro: int) -> np.ndarray:
    """The longest that operations take, one for each micro-batch and chunk that memory holds at once."""
    density = [time / np.maximum(mb, 1e-300) for time, mb in zip(times, held, strict=True)]
    found = [_in_turn(times, held, room, micro, first) for first in (DOWN, UP)]
    return np.where(density[DOWN] >= density[UP], found[0], found[1])


def _in_turn(
    times: Sequence[np.ndarray], held: Sequence[np.ndarray], room: np.ndarray, micro: int, first: int
) -> np.ndarray:
    other = UP - first
    count = np.minimum(micro, room / np.maximum(held[first], 1e-300))
    rest = np.maximum(room - count * held[first], 0.0)
    return count * times[first] + np.minimum(micro, rest / np.maximum(held[other], 1e-300)) * times[other]


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.append(0.0, list(itertools.accumulate(values)))
