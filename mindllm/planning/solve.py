"""Find the best plan of a problem, with a lower bound of the step of every plan: the entry point to all solvers."""

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
from mindllm.planning.plan import (
    Evaluation,
    Plan,
    evaluate,
    even_counts,
    peak_memory,
    plan_costs,
    problem_orders,
    quickest,
    try_plan,
)
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.several_chunks.planner import solve_interleaved
from mindllm.schedules.steady import NotSteady
from mindllm.units import MIB, gigabytes

GRACE = 2.0  # seconds beyond the deadline for a first plan, or for the memory that would suffice


@dataclass(frozen=True)
class Solution:
    """A plan, a lower bound of all plans, and the even split (None if it does not fit the memory).

    Attributes:
        lower_bound: a step that no plan is shorter than; None if none was proved.
    """

    best: Evaluation
    lower_bound: float | None
    solve_seconds: float
    even: Evaluation | None

    @property
    def gap(self) -> float | None:
        """Distance to the optimum at most, as a share of the lower bound; None if it is unknown."""
        if self.lower_bound is not None and self.best.step_time <= self.lower_bound:
            return 0.0
        return self.best.step_time / self.lower_bound - 1 if self.lower_bound else None


class Infeasible(CheckFailed):
    """No plan fits the memory."""


def solve(problem: Problem, seconds: float = 60.0) -> Solution:
    """Plan ``problem`` within ``seconds``.

    The even split is always simulated. If it does not fit, the search for a first plan, or for the memory that would
    suffice, may take :data:`GRACE` seconds longer. A simulation that is running at the deadline is completed.

    Raises:
        Infeasible: no split and no recomputation fits the memory.
        UserError: no plan was found in that time.
    """
    started = now()
    deadline = started + seconds
    even = even_split(problem, deadline)
    first_deadline = deadline if even else deadline + GRACE
    one_chunk = problem.chunks == 1 and problem.schedule not in IN_PIECES
    solver = solve_one_chunk if one_chunk else solve_interleaved
    best, proved = None, 0.0  # the proved bound of the makespan is infinite if no plan exists
    with contextlib.suppress(OutOfTime):
        best, proved = solver(problem, even, deadline, first_deadline)
    best = quickest(best, even)
    if best is None and math.isinf(proved):
        raise Infeasible(_infeasible_message(problem, deadline + GRACE))
    if best is None:
        raise UserError(
            f"{problem.name}: found no plan within {seconds:g} s and no proof that none exists; increase --seconds"
        )
    best = keep_on_device(best)
    bound = min(max(proved, work_bound(problem)) + problem.exposed_communication, best.step_time)
    return Solution(best, bound if bound or not best.step_time else None, now() - started, even)


def work_bound(problem: Problem) -> float:
    """Return a lower bound of the makespan that needs no search, with the quickest recomputation of every layer.

    Some stage has at least the average work, and the first micro-batch passes every place forward and backward.
    """
    times = [layer.forward + min(kind.backward for kind in layer.kinds.values()) for layer in problem.layers]
    ends = (problem.head, problem.tail)
    work = sum(time * layer.count for time, layer in zip(times, problem.layers, strict=True))
    work += sum(end.forward + end.backward for end in ends)
    delayed = 0.0  # weight gradients of a V: the way back does not wait for them
    if problem.v_shape:
        delayed = sum(layer.weight_gradient * layer.count for layer in problem.layers)
        delayed += sum(end.weight_gradient for end in ends)
    crossings = 2 * problem.point_to_point * problem.hops
    return max(work * problem.passes / problem.stages, work - delayed + crossings)


def _infeasible_message(problem: Problem, deadline: float) -> str:
    """Return the error for a problem that no plan fits, with the smallest increase of memory after which one fits."""
    message = f"{problem.name}: no split and no recomputation fits the memory"
    try:
        lightest = lightest_split(problem, deadline)
    except OutOfTime:
        return message
    more, stage = lightest.missing_mb, lightest.stage
    limit = problem.per_stage("limit_mb")[stage]
    gb = gigabytes((limit + more,), MIB)
    return (
        f"{message}: every plan lacks {gb.at_least(more)} GB on some stage, "
        f"first on stage {stage}; with limits {gb.at_least(more)} GB higher ({gb.at_least(limit + more)} GB there) one fits"
    )


def even_split(problem: Problem, deadline: float = math.inf) -> Evaluation | None:
    """Return the better even split with the recomputation that suits it best, or None if it does not fit.

    The first even split is always simulated, a second one only before ``deadline``.
    """
    best = None
    for number, plan in enumerate(_even_plans(problem)):
        if number and passed(deadline):
            break
        with contextlib.suppress(NotSteady, OutOfTime):
            best = quickest(best, try_plan(problem, plan, deadline))
    return best


def _even_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the even splits that fit, with the recomputation that suits them best."""
    choice = StageChoice(problem, Mixes(problem), problem_orders(problem))
    for counts in even_counts(problem):
        with contextlib.suppress(ValueError):
            yield choice.plan(np.array(counts))


def keep_on_device(best: Evaluation) -> Evaluation:
    """Return the plan without the moves to the host that memory does not require, from the last layer of each place on.

    Solvers see no cost in a move whose copies are hidden, so they may choose it unnecessarily.
    """
    problem = best.problem
    kinds = problem.yaml_kinds or {}
    # kinds that move results, and the kind with the same recomputation that moves nothing
    without_swap = {
        name: other
        for name, kind in kinds.items()
        if kind.swap
        for other, candidate in kinds.items()
        if candidate == kind.model_copy(update={"swap": 0})
    }
    if not without_swap:
        return best
    limits = np.array(problem.per_stage("limit_mb")) + 1e-6
    places = [list(place) for place in best.plan.places]
    for place in places:
        for number in reversed(range(len(place))):
            if place[number] not in without_swap:
                continue
            swapped, place[number] = place[number], without_swap[place[number]]
            plan = Plan(tuple(map(tuple, places)))
            if (peak_memory(problem, plan_costs(problem, plan), best.line.table.orders) > limits).any():
                place[number] = swapped
    plan = Plan(tuple(map(tuple, places)))
    if plan != best.plan:
        with contextlib.suppress(NotSteady):
            return quickest(evaluate(problem, plan), best) or best
    return best
