"""The best plan of a problem, with a lower bound of every plan's step: one door to the solvers of the schedules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindllm.architecture.layer_counts import IN_PIECES
from mindllm.deadline import OutOfTime, now, passed
from mindllm.errors import CheckFailed, UserError
from mindllm.planning.one_chunk.planner import solve_one_chunk
from mindllm.planning.plan import Evaluation, Plan, even_counts, orders_of, quickest, try_plan
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.recomputation.staying import staying
from mindllm.planning.several_chunks.planner import solve_interleaved
from mindllm.schedules.steady import NotSteady
from mindllm.units import MIB, gigabytes

GRACE = 2.0  # seconds beyond the deadline for a first plan, or for what would fit where nothing does


@dataclass(frozen=True)
class Solution:
    """A plan, what no plan can beat, and what the even split takes (None where it does not fit the memory).

    Attributes:
        lower_bound: a step that no plan is shorter than; None where none was proved.
    """

    best: Evaluation
    lower_bound: float | None
    solve_seconds: float
    even: Evaluation | None

    @property
    def gap(self) -> float | None:
        """How far the plan may be from the optimum, as a share of the lower bound; None where that is not known."""
        if self.lower_bound is not None and self.best.step_time <= self.lower_bound:
            return 0.0
        return self.best.step_time / self.lower_bound - 1 if self.lower_bound else None


class Infeasible(CheckFailed):
    """No plan fits the memory."""


def solve(problem: Problem, seconds: float = 60.0) -> Solution:
    """Plans ``problem`` within ``seconds``.

    The even split is simulated in any case. Where it does not fit, a first plan, or what would fit, is looked for :data:`GRACE`
    seconds longer. A simulation that is under way at the end is awaited.

    Raises:
        Infeasible: no split and no recomputation fits the memory.
        UserError: no plan was found in that time.
    """
    started = now()
    deadline = started + seconds
    even = even_split(problem, deadline)
    try:
        best, proved = _solver(problem, even, deadline, deadline if even else deadline + GRACE)
    except OutOfTime:
        best, proved = None, 0.0
    best = quickest(best, even)
    if best is None and math.isinf(proved):
        raise Infeasible(_what_would_fit(problem, deadline + GRACE))
    if best is None:
        raise UserError(
            f"{problem.name}: no plan was found in {seconds:g} s, nor that there is none; give more --seconds"
        )
    best = staying(best)
    bound = min(max(proved, work_bound(problem)) + problem.exposed_communication, best.step_time)
    return Solution(best, bound if bound or not best.step_time else None, now() - started, even)


def _solver(
    problem: Problem, even: Evaluation | None, deadline: float, first: float
) -> tuple[Evaluation | None, float]:
    """The best plan found, None without one, and a proved lower bound of the makespan, infinite where no plan exists.

    ``first`` is the deadline of a first plan.
    """
    if problem.chunks == 1 and problem.schedule not in IN_PIECES:
        return solve_one_chunk(problem, even, deadline, first)
    return solve_interleaved(problem, even, deadline, first)


def work_bound(problem: Problem) -> float:
    """A lower bound of the makespan that needs no search, with the quickest recomputation of every layer.

    Some stage has at least the average of all work, and the first micro-batch passes every place and comes back.
    """
    quickest = [layer.forward + min(kind.backward for kind in layer.kinds.values()) for layer in problem.layers]
    ends = (problem.head, problem.tail)
    work = sum(time * layer.count for time, layer in zip(quickest, problem.layers, strict=True))
    work += sum(end.forward + end.backward for end in ends)
    late = 0.0  # weight gradients, which the way back need not wait for
    if problem.v_shape:
        late = sum(layer.weight_gradient * layer.count for layer in problem.layers) + sum(
            e.weight_gradient for e in ends
        )
    crossings = 2 * problem.point_to_point * problem.hops
    return max(work * problem.passes / problem.stages, work - late + crossings)


def _what_would_fit(problem: Problem, deadline: float) -> str:
    """Says that no plan fits, and the smallest change after which one does."""
    try:
        lightest = lightest_split(problem, deadline)
    except OutOfTime:
        return f"{problem.name}: no split and no recomputation fits the memory"
    more, stage = lightest.missing_mb, lightest.stage
    limit = problem.per_stage("limit_mb")[stage]
    gb = gigabytes((limit + more,), MIB)
    return (
        f"{problem.name}: no split and no recomputation fits the memory: every plan lacks {gb.at_least(more)} GB on some stage, "
        f"first on stage {stage}; with limits {gb.at_least(more)} GB higher ({gb.at_least(limit + more)} GB there) one fits"
    )


def even_split(problem: Problem, deadline: float = math.inf) -> Evaluation | None:
    """The better even split with the recomputation that suits it best, or None when it does not fit.

    The first one is simulated however late it is, a second one until ``deadline``.
    """
    best = None
    for number, plan in enumerate(_even_plans(problem)):
        if number and passed(deadline):
            break
        with contextlib.suppress(NotSteady, OutOfTime):
            best = quickest(best, try_plan(problem, plan, deadline))
    return best


def _even_plans(problem: Problem) -> Iterator[Plan]:
    """The even splits that fit, with the recomputation that suits them best."""
    choice = StageChoice(problem, Mixes(problem), orders_of(problem))
    for counts in even_counts(problem):
        with contextlib.suppress(ValueError):
            yield choice.plan(np.array(counts))
