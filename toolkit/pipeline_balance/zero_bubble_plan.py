"""Planning for zero-bubble schedules: splits for more or fewer micro-batches under way, each with its own schedule.

Every stage computes all its passes, and cannot begin before the forward passes of the stages before it: the step is at least
``m (f + b) + sum of f before``, and the least of that over all splits, with the memory of one micro-batch, is the bound.
"""

from __future__ import annotations

import math

import numpy as np

from toolkit.pipeline_balance.plan import Evaluation, Plan, evaluate
from toolkit.pipeline_balance.problem import Problem
from toolkit.pipeline_balance.recompute_mix import Mixes
from toolkit.pipeline_balance.stage_table import StageTable

PRECISE = 1e-6


class BusyStages:
    """Bounds a step by what each stage computes alone."""

    def __init__(self, problem: Problem, table: StageTable) -> None:
        self.problem, self.table = problem, table
        self.forward, self.backward = table.times

    def decide(self, target: float) -> list[int] | None:
        """Layers of each stage such that ``m t`` and the forward passes before are at most ``target``, or None."""
        stages, layers, longest = self.forward.shape
        sums = np.full((stages + 1, layers + 1), np.inf)
        sums[0, 0] = 0
        came = np.zeros((stages + 1, layers + 1), int)
        for stage in range(stages):
            before = sums[stage, :layers, None]
            own = self.problem.micro_batches * (self.forward[stage] + self.backward[stage])
            fits = before + stage * self.problem.point_to_point + own <= target
            value = np.where(fits, before + self.forward[stage], np.inf)
            for count in range(longest):
                ends = slice(count + 1, layers + 1)
                better = value[: layers - count, count] < sums[stage + 1, ends]
                sums[stage + 1, ends] = np.where(better, value[: layers - count, count], sums[stage + 1, ends])
                came[stage + 1, ends] = np.where(better, count + 1, came[stage + 1, ends])
        if not np.isfinite(sums[stages, layers]):
            return None
        counts, end = [], layers
        for stage in reversed(range(stages)):
            counts.append(int(came[stage + 1, end]))
            end -= counts[-1]
        return counts[::-1]


def solve_zero_bubble(problem: Problem, even: Evaluation | None) -> tuple[Plan | None, float]:
    """The best of the plans tried, or None when none fits, and a lower bound."""
    mixes, stages = Mixes(problem), problem.stages
    behind = stages - np.arange(stages)
    most = problem.micro_batches
    depths = {"zb1p": [np.full(stages, stages)], "zb2p": [2 * behind - 1, np.full(stages, stages)]}
    held = [*depths.get(problem.schedule, [2 * behind - 1, np.full(stages, stages)]), behind, np.ones(stages, int)]
    best, bound = even, math.inf
    for alive in held:  # the last, of one micro-batch, gives the bound
        table = StageTable(problem, mixes, np.minimum(most, alive), problem.layer_count)
        bound, counts = _least(BusyStages(problem, table))
        if counts is not None:
            tried = try_plan(problem, table.plan(counts))
            best = min((e for e in (best, tried) if e), key=lambda e: e.step_time, default=None)
    return (best.plan if best else None), bound


def try_plan(problem: Problem, plan: Plan) -> Evaluation | None:
    """The plan with its schedule, or None when memory does not hold one micro-batch."""
    try:
        tried = evaluate(problem, plan)
    except ValueError:
        return None
    return tried if tried.fits else None


def _least(programme: BusyStages) -> tuple[float, list[int] | None]:
    """The least bound and a split that has it."""
    total = programme.forward + programme.backward
    slowest = float(total[np.isfinite(total)].max(initial=0.0)) + programme.problem.point_to_point
    low, high = 0.0, (programme.problem.micro_batches + programme.problem.stages) * slowest + 1.0
    found = programme.decide(high)
    if found is None:
        return math.inf, None
    while high - low > PRECISE * high:
        middle = (low + high) / 2
        tried = programme.decide(middle)
        low, high = (middle, high) if tried is None else (low, middle)
        found = tried or found
    return low, found
