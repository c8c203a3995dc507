"""Planning for zero-bubble schedules: what each stage alone asks of a step bounds it, and gives the splits that are tried.

With c micro-batches under way on a stage, whose activations wait for the weight gradient, no step is shorter than each of

    X + m t                     all its work, after X, the forward passes of the stages before
    X + Y + m t - min(c, m) f   the first micro-batch's way Y to the last stage and back, meanwhile at most c forward passes
    X + ceil(m / c) (Y + t - f)     a micro-batch gives up its place only after its way to the last stage and back
    X + Z + m (t - w)           all its work but weight gradients, and the last backward passes Z of the stages before

f, t and w are the forward pass, all passes and the weight gradient of the stage; what is before and behind is known from the
layers there, each taken with its quickest recomputation. More micro-batches under way need more recomputation. The least of the
largest over all splits is the bound. Splits that are little above it are tried.
"""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np

from mindllm.planning.deadline import OutOfTime, now, passed
from mindllm.planning.one_chunk.planner import longest_stage, solve_one_chunk
from mindllm.planning.plan import Evaluation, Plan, evaluate, quickest
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_table import StageTable

NUMBERS = 24  # of micro-batches under way that are told apart
SLACK = (0.0, 0.03, 0.08, 0.2)  # beyond the bound: splits that keep to it and compute least are tried


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
        self.steps = np.array([self._steps(table, most) for table, most in zip(self.tables, numbers[1:], strict=True)])
        self.end = np.minimum(np.arange(self.layers)[:, None] + 1 + np.arange(self.steps.shape[3]), self.layers)

    def _steps(self, table: StageTable, number: int) -> np.ndarray:
        """The largest of the four, with the times of ``table`` and no more than ``number`` micro-batches under way."""
        possible = np.isfinite(table.times[0])
        times = [np.where(possible, found, 0.0) for found in table.times]
        found = [self._of_stage(stage, times[0][stage], times[1][stage], number) for stage in range(self.stages)]
        return np.where(possible, found, np.inf)

    def _of_stage(self, stage: int, forward: np.ndarray, backward: np.ndarray, number: int) -> np.ndarray:
        problem, micro, delay = self.problem, self.problem.micro_batches, self.problem.point_to_point
        start = np.arange(self.layers)[:, None]
        end = np.minimum(start + 1 + np.arange(forward.shape[1]), self.layers)
        weight = self.weight[end] - self.weight[start]
        first, final = self.onward[start] + stage * delay, self.back[start] + stage * delay
        trip = self.onward[-1] - self.onward[end] + self.back[-1] - self.back[end]
        trip = trip + 2 * (self.stages - 1 - stage) * delay
        if stage:
            first, final = first + problem.head.forward, final + problem.head.backward - problem.head.weight_gradient
        else:
            weight = weight + problem.head.weight_gradient
        if stage < self.stages - 1:
            trip = trip + problem.tail.forward + problem.tail.backward - problem.tail.weight_gradient
        else:
            weight = weight + problem.tail.weight_gradient
        total = forward + backward
        work = micro * total
        waiting = trip - (min(number, micro) - 1) * forward
        turns = math.ceil(micro / number) * (trip + total) - work
        return first + work + np.max(np.broadcast_arrays(0.0, waiting, turns, final - micro * weight), axis=0)

    def bound(self) -> float:
        """The least of the largest over all splits."""
        largest, least = np.append(np.full(self.layers, np.inf), 0.0), self.steps.min(axis=0)
        for stage in reversed(range(self.stages)):
            largest = np.append(np.maximum(least[stage], largest[self.end]).min(axis=1), np.inf)
        return float(largest[0])

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
            table = self.tables[int(value[:, stage, start, count - 1].argmin())]
            places.append(table.place(stage, start, count))
            start += count
        return Plan(tuple(places))


def _sums(values: list[float]) -> np.ndarray:
    return np.append(0.0, np.cumsum(values))


def solve_zero_bubble(
    problem: Problem, even: Evaluation | None, deadline: float, first: float
) -> tuple[Evaluation | None, float]:
    """The best of the plans tried, None where none fits, and a lower bound: 0 without one, infinite when no plan exists.

    ``first`` is the deadline of a first plan where the ``even`` split is none.
    """
    mixes, best, bound = Mixes(problem, first), even, 0.0
    with contextlib.suppress(OutOfTime):
        share = now() + 0.25 * (deadline - now())
        one_by_one, _ = solve_one_chunk(problem.model_copy(update={"schedule": "1f1b"}), None, share, share)
        if one_by_one is not None:
            best = quickest(best, try_plan(problem, one_by_one.plan, deadline))
        most = problem.layer_count - problem.stages + 1
        stages = LoneStages(problem, mixes, min(most, longest_stage(problem, best.line.makespan)) if best else most)
        bound = stages.bound()
        if not math.isfinite(bound):
            return best, bound
        behind = problem.stages - np.arange(problem.stages)
        profiles = [np.ones_like(behind), behind, np.minimum(2 * behind - 1, problem.stages), 2 * behind - 1]
        plans = (stages.plan(bound * (1 + slack), profile) for slack, profile in itertools.product(SLACK, profiles))
        for plan in dict.fromkeys(plan for plan in plans if plan is not None):
            if best is None or not passed(deadline):
                best = quickest(best, try_plan(problem, plan, deadline))
    return best, bound


def try_plan(problem: Problem, plan: Plan, deadline: float = math.inf) -> Evaluation | None:
    """The plan with the best schedule found until ``deadline``, or None when memory does not hold one micro-batch."""
    try:
        tried = evaluate(problem, plan, deadline)
    except ValueError:
        return None
    return tried if tried.fits else None
