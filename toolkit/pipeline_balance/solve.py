"""The best plan of a problem, with a lower bound of every plan's step: one door to the solvers of the schedules."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from mindllm.errors import CheckFailed
from toolkit.pipeline_balance.feasible import lightest_split
from toolkit.pipeline_balance.interleaved import solve_interleaved
from toolkit.pipeline_balance.one_chunk import solve_one_chunk
from toolkit.pipeline_balance.plan import Evaluation, evaluate, even_counts, orders_of
from toolkit.pipeline_balance.problem import ZERO_BUBBLE, Problem
from toolkit.pipeline_balance.recompute_mix import Mixes
from toolkit.pipeline_balance.stage_choice import StageChoice
from toolkit.pipeline_balance.zero_bubble_plan import solve_zero_bubble, try_plan


@dataclass(frozen=True)
class Solution:
    """A plan, what no plan can beat, and what the even split takes (None where it does not fit the memory)."""

    best: Evaluation
    lower_bound: float
    solve_seconds: float
    even: Evaluation | None

    @property
    def gap(self) -> float:
        """How far the plan may be from the optimum, as a share of the lower bound."""
        return max(0.0, self.best.step_time / self.lower_bound - 1) if self.lower_bound else 0.0


class Infeasible(CheckFailed):
    """No plan fits the memory."""


def solve(problem: Problem, seconds: float = 60.0) -> Solution:
    """Plans ``problem`` within about ``seconds``.

    Raises:
        Infeasible: no split and no recomputation fits the memory.
    """
    started = time.monotonic()
    until = started + seconds
    even = even_split(problem)
    if problem.schedule in ZERO_BUBBLE:
        plan, bound = solve_zero_bubble(problem, even, until)
    elif problem.chunks == 1:
        plan, bound = solve_one_chunk(problem, until, even)
    else:
        plan, bound = solve_interleaved(problem, until)
    if plan is None:
        raise Infeasible(_what_would_fit(problem))
    best = evaluate(problem, plan)
    if even is not None and even.step_time < best.step_time:
        best = even
    bound = min(bound + problem.exposed_communication, best.step_time)
    return Solution(best, bound, time.monotonic() - started, even)


def _what_would_fit(problem: Problem) -> str:
    """Says that no plan fits, and the smallest change after which one does."""
    lightest = lightest_split(problem)
    more, stage = lightest.missing_mb, lightest.stage
    limit = problem.per_stage("limit_mb")[stage]
    return (
        f"{problem.name}: no split and no recomputation fits the memory: every plan lacks {more:,.1f} MB on some stage, first on "
        f"stage {stage}; with limits {more:,.1f} MB higher ({limit + more:,.1f} MB there) one fits"
    )


def even_split(problem: Problem) -> Evaluation | None:
    """The better even split with the recomputation that suits it best, or None when it does not fit."""
    choice = StageChoice(problem, Mixes(problem), orders_of(problem))
    found = []
    for counts in even_counts(problem):
        try:
            found.append(try_plan(problem, choice.plan(np.array(counts))))
        except ValueError:
            continue
    return min((tried for tried in found if tried), key=lambda evaluation: evaluation.step_time, default=None)
