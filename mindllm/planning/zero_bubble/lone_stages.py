"""What each stage alone asks of a zero-bubble step: a lower bound of all plans, and what their splits are judged by.

With c micro-batches under way on a stage, whose activations wait for the weight gradient, no step is shorter than either of

    X + m t + max(0, Y - (c - 1) f) + max(0, Z - c w)
    X + ceil(m / c) (Y + t) + max(0, Z - w)

X are the forward passes of the stages before, Y is a micro-batch's way from the stage to the last one and back, Z the last
backward passes of the stages before and a weight gradient of the first. The first: all work of the stage, a wait for the first
backward pass, before which there are at most c forward passes, and, as at most c weight gradients are left when the last backward
pass is done, what is then longer on the way back. The second: a micro-batch gives up its place only after its way to the last
stage and back, and the last one goes on to the first stage.

f, t and w are the forward pass, all passes and the weight gradient of the stage; what is before and behind is known from the
layers there, taken with their quickest recomputation (``joint_bound.py`` takes that of the other stages). More micro-batches
under way need more recomputation. The least of the largest over all splits is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from mindllm.planning.plan import Plan
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_table import StageTable

NUMBERS = 64  # of micro-batches under way that are told apart


@dataclass(frozen=True)
class Options:
    """What a stage may hold and recompute, ``[options]``: layers from ``start`` to ``end``, and as :func:`asked` says.

    ``alone`` is the least step that the stage alone allows.
    """

    start: np.ndarray
    end: np.ndarray
    first: np.ndarray
    final: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    under_way: np.ndarray
    turns: np.ndarray
    alone: np.ndarray

    @property
    def trip(self) -> np.ndarray:
        """What a micro-batch takes on the stage beside its weight gradient."""
        return self.forward + self.backward - self.weight

    def asked(self, beyond: np.ndarray, micro_batches: int) -> np.ndarray:
        """The least step with the way ``beyond`` from the next stage to the last one and back."""
        found = asked(
            micro_batches, self.first, beyond, self.final, self.forward, self.backward, self.weight, self.under_way, self.turns
        )  # fmt: skip
        return np.maximum(self.alone, found)

    def take(self, chosen: np.ndarray) -> Options:
        """Those at these indices."""
        return Options(*(getattr(self, field.name)[chosen] for field in fields(self)))


class LoneStages:
    """The least step that each stage alone allows, for every run of layers and several numbers of micro-batches under way.

    Attributes:
        fewest: micro-batches that each may have under way at least, ``[numbers]``.
        steps: ``[numbers, stages, layers, longest]``, infinite where memory does not suffice.
    """

    def __init__(self, problem: Problem, mixes: Mixes, longest: int) -> None:
        self.problem, self.stages, self.layers = problem, problem.stages, problem.layer_count
        order = [problem.layers[index] for index in problem.layer_order]
        quickest = [min(kind.backward for kind in layer.kinds.values()) for layer in order]
        self.weight = _sums([layer.weight_gradient for layer in order])
        self.onward = _sums([layer.forward for layer in order])
        self.back = _sums(quickest) - self.weight
        most = {"zb1p": 1, "zb2p": 2}.get(problem.schedule, problem.micro_batches) * problem.stages
        ladder = np.geomspace(1, min(problem.micro_batches, most), NUMBERS)
        numbers = [0, *np.unique(np.rint(ladder).astype(int)).tolist()]
        self.tables = [StageTable(problem, mixes, np.full(self.stages, number + 1), longest) for number in numbers[:-1]]
        self.fewest = np.array(numbers[:-1]) + 1
        self.most = np.array(numbers[1:])
        self.steps = np.array([self._steps(table, most) for table, most in zip(self.tables, numbers[1:], strict=True)])
        self.end = np.minimum(np.arange(self.layers)[:, None] + 1 + np.arange(self.steps.shape[3]), self.layers)

    def _steps(self, table: StageTable, number: int) -> np.ndarray:
        """The larger of the two, with the times of ``table`` and no more than ``number`` micro-batches under way."""
        possible = np.isfinite(table.times[0])
        times = [np.where(possible, found, 0.0) for found in table.times]
        found = [self._of_stage(stage, times[0][stage], times[1][stage], number) for stage in range(self.stages)]
        return np.where(possible, found, np.inf)

    def _of_stage(self, stage: int, forward: np.ndarray, backward: np.ndarray, number: int) -> np.ndarray:
        problem, micro, delay = self.problem, self.problem.micro_batches, self.problem.point_to_point
        start = np.arange(self.layers)[:, None]
        end = np.minimum(start + 1 + np.arange(forward.shape[1]), self.layers)
        weight = self.weight[end] - self.weight[start]
        first, final = self._around(stage, start)
        trip = self.onward[-1] - self.onward[end] + self.back[-1] - self.back[end]
        trip = trip + 2 * (self.stages - 1 - stage) * delay
        if stage < self.stages - 1:
            trip = trip + problem.tail.forward + problem.tail.backward - problem.tail.weight_gradient
        weight = weight + self._end_weight(stage)
        turns = math.ceil(micro / number)
        return asked(micro, first, trip, final, forward, backward, weight, min(number, micro), turns)

    def _around(self, stage: int, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward passes before a stage, and what is left on those stages when its own last backward pass is done."""
        if not stage:
            return np.zeros(start.shape), np.zeros(start.shape)
        head, crossed = self.problem.head, stage * self.problem.point_to_point
        gradient = self.weight[1]  # of the first layer, with the head's
        return self.onward[start] + head.forward + crossed, self.back[start] + head.backward + gradient + crossed

    def _end_weight(self, stage: int) -> float:
        """Weight gradient of head and tail on a stage."""
        head, tail = self.problem.head, self.problem.tail
        return head.weight_gradient * (stage == 0) + tail.weight_gradient * (stage == self.stages - 1)

    def bound(self) -> float:
        """The least of the largest over all splits."""
        largest, least = np.append(np.full(self.layers, np.inf), 0.0), self.steps.min(axis=0)
        for stage in reversed(range(self.stages)):
            largest = np.append(np.maximum(least[stage], largest[self.end]).min(axis=1), np.inf)
        return float(largest[0])

    @cached_property
    def options(self) -> list[Options]:
        """Of every stage."""
        return [self._options(stage) for stage in range(self.stages)]

    def _options(self, stage: int) -> Options:
        """Of every run of layers the different backward times, each with the most micro-batches under way that it allows."""
        forward = np.array([table.times[0][stage] for table in self.tables])
        backward = np.array([table.times[1][stage] for table in self.tables])
        last = np.append(
            backward[1:] > backward[:-1], np.full((1, *backward.shape[1:]), True), axis=0
        )  # of the same time
        number, start, count = np.nonzero(np.isfinite(backward) & last)
        end = start + count + 1
        weight = self.weight[end] - self.weight[start]
        weight += self._end_weight(stage)
        first, final = self._around(stage, start)
        under_way = np.minimum(self.most[number], self.problem.micro_batches)
        turns = np.ceil(self.problem.micro_batches / under_way)
        times = forward[number, start, count], backward[number, start, count]
        return Options(
            start, end, first, final, *times, weight, under_way, turns, self.steps[number, stage, start, count]
        )

    def plan(self, target: float, under_way: np.ndarray) -> Plan | None:
        """Of the splits of which every stage allows ``target``, the one whose stages together ask for least.

        ``under_way``: micro-batches that each stage must be able to have under way, ``[stages]``.
        """
        enough = self.fewest[:, None] >= np.minimum(under_way, self.fewest[-1])
        value = np.where(enough[..., None, None] & (self.steps <= target), self.steps, np.inf)
        least, sums = value.min(axis=0), np.append(np.full(self.layers, np.inf), 0.0)
        chosen: list[np.ndarray] = []
        for stage in reversed(range(self.stages)):
            found = least[stage] + sums[self.end]
            chosen.insert(0, found.argmin(axis=1))
            sums = np.append(found.min(axis=1), np.inf)
        if not math.isfinite(sums[0]):
            return None
        places, start = [], 0
        for stage, best in enumerate(chosen):
            count = int(best[start]) + 1
            places.append(self.place(int(value[:, stage, start, count - 1].argmin()), stage, start, count))
            start += count
        return Plan(tuple(places))

    def plan_of(self, options: Sequence[Options], chosen: Sequence[int]) -> Plan:
        """The plan of one of the options of each stage."""
        most, places = np.minimum(self.most, self.problem.micro_batches), []
        for stage, (mine, index) in enumerate(zip(options, chosen, strict=True)):
            start, number = int(mine.start[index]), int(np.searchsorted(most, mine.under_way[index]))
            places.append(self.place(number, stage, start, int(mine.end[index]) - start))
        return Plan(tuple(places))

    def place(self, number: int, stage: int, start: int, count: int) -> tuple[str, ...]:
        """Recompute kinds of ``count`` layers from ``start`` on, with room for the micro-batches of ``fewest[number]``."""
        return self.tables[number].place(stage, start, count)


def asked(
    micro_batches: int, first: np.ndarray, trip: np.ndarray, final: np.ndarray, forward: np.ndarray, backward: np.ndarray,
    weight: np.ndarray, under_way: np.ndarray | int, turns: np.ndarray | int,
) -> np.ndarray:  # fmt: skip
    """The larger of the two; ``trip`` goes to the last stage and back, ``final`` is behind the last backward pass."""
    total = forward + backward
    work = micro_batches * total
    waiting = np.maximum(0.0, trip - (under_way - 1) * forward) + np.maximum(0.0, final - under_way * weight)
    again = turns * (trip + total) + np.maximum(0.0, final - weight)
    return first + np.maximum(work + waiting, again)


def _sums(values: list[float]) -> np.ndarray:
    return np.append(0.0, np.cumsum(values))
