"""The best plan of a problem, with a lower bound of every plan's step: one door to the solvers of the schedules."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from mindllm.errors import UserError
from toolkit.pipeline_balance.feasible import lightest_split
from toolkit.pipeline_balance.interleaved import solve_interleaved
from toolkit.pipeline_balance.one_chunk import GPipe, OneChunk, StageTable, held_micro_batches
from toolkit.pipeline_balance.plan import Evaluation, Plan, evaluate, even_counts, orders_of
from toolkit.pipeline_balance.problem import ZERO_BUBBLE, Problem
from toolkit.pipeline_balance.recompute_mix import Mixes
from toolkit.pipeline_balance.schedule import timetable
from toolkit.pipeline_balance.search import Search
from toolkit.pipeline_balance.stage_choice import StageChoice
from toolkit.pipeline_balance.zero_bubble_plan import solve_zero_bubble, try_plan

PRECISE = 1e-7  # to which the bound is searched
WANDER = 8.0  # seconds of local search where bound and plan do not meet
CLOSE = 0.01  # a gap above which the search goes on as long as it may


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


class Infeasible(UserError):
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
        plan, bound = solve_zero_bubble(problem, even)
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


def solve_one_chunk(problem: Problem, until: float, even: Evaluation | None) -> tuple[Plan | None, float]:
    """A plan and a lower bound by the dynamic programme, and a local search where they do not meet."""
    mixes = Mixes(problem)
    orders = orders_of(problem)
    held = held_micro_batches(problem, orders)
    programme = GPipe if problem.schedule == "gpipe" else OneChunk
    longest = math.ceil(problem.layer_count / problem.stages * 1.5) + 2
    upper = even.line.makespan if even else math.inf
    best = even
    while True:  # until no stage could hold more layers than were considered
        longest = min(longest, problem.layer_count - problem.stages + 1)
        table = StageTable(problem, mixes, held, longest)
        dynamic = programme(problem, table)
        found = dynamic.decide(math.inf)
        if found is not None:
            first = evaluate(problem, table.plan(found.counts))
            best = min((e for e in (best, first) if e), key=lambda e: e.line.makespan)
            upper = best.line.makespan
        if longest == problem.layer_count - problem.stages + 1 or too_long(problem, longest + 1, upper):
            break
        longest *= 2
    if best is None:
        return None, math.inf
    low, best = _least_bound(problem, dynamic, best)
    if best.line.makespan > low * (1 + 10 * PRECISE):
        search = Search(problem, StageChoice(problem, mixes, orders), timetable(orders, 1))
        search.descend(np.array(best.plan.counts), until)
        search.wander(min(until, time.monotonic() + WANDER), low)
        search.wander(until, low * (1 + CLOSE))
        if search.best is not None:
            improved = evaluate(problem, search.choice.plan(search.best))
            best = min(best, improved, key=lambda e: e.line.makespan)
    return best.plan, low


def _least_bound(problem: Problem, dynamic: OneChunk, best: Evaluation) -> tuple[float, Evaluation]:
    """The least step whose bounds can be kept, by halves, and the best of ``best`` and the plans met on the way."""
    low, high = 0.0, best.line.makespan
    while high - low > PRECISE * high:
        middle = (low + high) / 2 if low else 0.75 * high
        found = dynamic.decide(middle)
        if found is None:
            low = middle
            continue
        high = min(middle, found.value)
        tried = evaluate(problem, dynamic.table.plan(found.counts))
        best = min(best, tried, key=lambda e: e.line.makespan)
    return low, best


def too_long(problem: Problem, count: int, upper: float) -> bool:
    """Whether a stage of ``count`` layers alone takes longer than ``upper``, whichever layers they are."""
    times = np.array([
        layer.forward + min(kind.backward for kind in layer.kinds.values())
        for layer in problem.layers for _ in range(layer.count)
    ])  # fmt: skip
    windows = np.convolve(times, np.ones(count), "valid")
    return bool(problem.micro_batches * windows.min() > upper)
