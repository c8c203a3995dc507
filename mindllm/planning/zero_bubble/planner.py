"""Zero-bubble plans: splits that ask for little more than the bound are tried, then improved by a local search."""

from __future__ import annotations

import contextlib
import itertools
import math

from mindllm.deadline import OutOfTime, now
from mindllm.planning.one_chunk.planner import longest_stage, solve_one_chunk
from mindllm.planning.plan import Evaluation, quickest, try_plan
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.zero_bubble.crossing_bound import CrossingBound
from mindllm.planning.zero_bubble.joint_bound import joint_bound
from mindllm.planning.zero_bubble.lone_stages import LoneStages
from mindllm.planning.zero_bubble.split_search import SplitSearch, near_splits, splits_by_profile

PROVEN = 1e-4  # a gap that ends the work
SHARE = 0.2  # of the time, for a plan of 1F1B
CROSSING = 0.5  # of the time that is left, for the bound by crossings


def solve_zero_bubble(
    problem: Problem, even: Evaluation | None, deadline: float, first: float
) -> tuple[Evaluation | None, float]:
    """The best of the plans tried, None where none fits, and a lower bound: 0 without one, infinite when no plan exists.

    ``first`` is the deadline of a first plan where the ``even`` split is none.
    """
    mixes, best, bound = Mixes(problem, first), even, 0.0
    with contextlib.suppress(OutOfTime):
        if best is None:
            best = _one_by_one(problem, None, deadline)
        most = problem.layer_count - problem.stages + 1
        stages = LoneStages(problem, mixes, min(most, longest_stage(problem, best.line.makespan)) if best else most)
        bound = stages.bound()
        if not math.isfinite(bound):
            return best, bound
        if even is not None:
            bound = max(bound, joint_bound(problem, stages.options, even.line.makespan, deadline))
            best = _one_by_one(problem, best, deadline)
        if best is None:
            best = _first(stages, bound, deadline)
        if best is not None:
            mixes.deadline = deadline
            if even is None:
                bound = max(bound, joint_bound(problem, stages.options, best.line.makespan, deadline))
            search = SplitSearch(stages, best, deadline)
            try:
                near = near_splits(stages, bound, best.line.makespan, deadline)
                search.begin(itertools.chain(near, splits_by_profile(stages, bound)))
                bound = _by_crossings(stages, search.best.line.makespan, bound, deadline)
                search.run(bound * (1 + PROVEN))
            finally:
                best = search.best
    return best, bound


def _first(stages: LoneStages, bound: float, deadline: float) -> Evaluation | None:
    """A plan that fits."""
    plans = (try_plan(stages.problem, plan, deadline) for plan in splits_by_profile(stages, bound))
    return next(filter(None, plans), None)


def _one_by_one(problem: Problem, best: Evaluation | None, deadline: float) -> Evaluation | None:
    """The better of the best plan and that of 1F1B, which is looked for in a share of the time."""
    share = now() + SHARE * (deadline - now())
    found, _ = solve_one_chunk(problem.model_copy(update={"schedule": "1f1b"}), None, share, share)
    return best if found is None else quickest(best, try_plan(problem, found.plan, deadline))


def _by_crossings(stages: LoneStages, limit: float, bound: float, deadline: float) -> float:
    """The larger of ``bound`` and what micro-batches that cross each other ask for, found in a share of the time."""
    share = now() + CROSSING * (deadline - now())
    with contextlib.suppress(OutOfTime):
        for found in CrossingBound(stages, limit).rising(share):
            bound = max(bound, found)
            if bound * (1 + PROVEN) >= limit:
                break
    return bound
