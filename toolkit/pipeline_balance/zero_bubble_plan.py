"""Planning for zero-bubble schedules: splits for more or fewer micro-batches under way, each with its own schedule.

Every stage computes all its passes, and cannot begin before the forward passes of the stages before it: the step is at least
``m (f + b) + sum of f before``, and the least of that over all splits, with the memory of one micro-batch, is the bound.
"""

from __future__ import annotations

import math

import numpy as np

from toolkit.pipeline_balance.one_chunk import OneChunk, Relaxed, StageTable
from toolkit.pipeline_balance.plan import Evaluation, Plan, evaluate
from toolkit.pipeline_balance.problem import Problem
from toolkit.pipeline_balance.recompute_mix import Mixes

PRECISE = 1e-6


class BusyStages(OneChunk):
    """Bounds a step by what each stage computes alone."""

    def decide(self, target: float) -> Relaxed | None:
        """As :meth:`OneChunk.decide`, of ``m t`` and the forward passes before."""
        layers = self.problem.layer_count
        sums = np.full((self.stages + 1, layers + 1), np.inf)
        sums[0, 0] = 0
        came = np.zeros((self.stages + 1, layers + 1), int)
        for stage in range(self.stages):
            begin = sums[stage, :layers, None] + stage * self.delay * (np.isfinite(sums[stage, :layers, None]))
            fits = begin + self.micro * self.total[stage] <= target
            value = np.where(fits, sums[stage, :layers, None] + self.forward[stage], np.inf)
            for count in range(self.table.longest):
                ends = slice(count + 1, layers + 1)
                better = value[: layers - count, count] < sums[stage + 1, ends]
                sums[stage + 1, ends] = np.where(better, value[: layers - count, count], sums[stage + 1, ends])
                came[stage + 1, ends] = np.where(better, count + 1, came[stage + 1, ends])
        if not np.isfinite(sums[self.stages, layers]):
            return None
        counts, end = [], layers
        for stage in reversed(range(self.stages)):
            counts.append(int(came[stage + 1, end]))
            end -= counts[-1]
        return Relaxed(counts[::-1], target)


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
    times = programme.total[np.isfinite(programme.total)]
    if not len(times):
        return math.inf, None
    low, high = (
        0.0,
        float(programme.micro * times.max() + programme.forward[np.isfinite(programme.forward)].max() * 1e3),
    )
    found = programme.decide(high)
    if found is None:
        return math.inf, None
    while high - low > PRECISE * high:
        middle = (low + high) / 2
        tried = programme.decide(middle)
        low, high = (middle, high) if tried is None else (low, middle)
        found = tried or found
    return low, found.counts
