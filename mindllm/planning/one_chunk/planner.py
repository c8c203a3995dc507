"""Planning with one chunk per stage: the step has a closed form, whose least value over all splits is found by bisection.

For a step to beat, a dynamic programme finds a split that keeps to it or proves that there is none (``split_program.py``). Splits
that it finds are simulated; without delays the closed forms are exact, so plan and bound meet. Where they do not, because partial
plans had to be merged or because delays make other chains longer, a local search improves the plan.
"""

from __future__ import annotations

import math
import time

import numpy as np

from mindllm.planning.deadline import OutOfTime, check
from mindllm.planning.local_search import Search
from mindllm.planning.one_chunk.gpipe import GPipe
from mindllm.planning.one_chunk.one_f_one_b import OneFOneB
from mindllm.planning.one_chunk.split_program import SplitProgram
from mindllm.planning.plan import Evaluation, Plan, evaluate, is_long, orders_of
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.recomputation.stage_table import StageTable, held_micro_batches
from mindllm.planning.schedules.orders import timetable

PRECISE = 1e-7  # to which the bound is searched
ROUGH = 1e-3  # to which it is searched to know how many layers a stage can have
NARROW, WIDE = 64, 4096  # partial plans kept, at first and where that does not suffice
WANDER = 8.0  # seconds of local search where bound and plan do not meet
CLOSE = 0.01  # a gap above which the search goes on as long as it may


def solve_one_chunk(problem: Problem, deadline: float, even: Evaluation | None) -> tuple[Plan | None, float]:
    """A plan, or None when none fits, and a lower bound of the makespan (infinite when none exists).

    Raises:
        OutOfTime: there was no plan at the deadline.
    """
    mixes, orders = Mixes(problem, math.inf if even is None else deadline), orders_of(problem)
    programme, best = _programme(problem, mixes, even, deadline)
    mixes.deadline = math.inf  # what a plan that was found is written with
    if best is None:
        return None, math.inf
    low, best = _least_bound(programme, best, deadline)
    if best.line.makespan > low * (1 + 10 * PRECISE) and not is_long(problem) and time.monotonic() < deadline:
        search = Search(problem, StageChoice(problem, mixes, orders), timetable(orders, 1))
        search.descend(np.array(best.plan.counts), deadline)
        search.wander(min(deadline, time.monotonic() + WANDER), low)
        search.wander(deadline, low * (1 + CLOSE))
        if search.best is not None:
            best = quicker(best, evaluate(problem, search.choice.plan(search.best)))
    return best.plan, low


def quicker(one: Evaluation | None, other: Evaluation) -> Evaluation:
    """The one with the shorter step."""
    return other if one is None or other.line.makespan < one.line.makespan else one


def _programme(
    problem: Problem, mixes: Mixes, best: Evaluation | None, deadline: float
) -> tuple[SplitProgram, Evaluation | None]:
    """The programme with all stages that a plan no worse than the best can have, and the best plan known then."""
    kind = GPipe if problem.schedule == "gpipe" else OneFOneB
    held, most = held_micro_batches(orders_of(problem)), problem.layer_count - problem.stages + 1
    longest = min(most, math.ceil(problem.layer_count / problem.stages * 1.5) + 2)
    while True:
        programme = kind(problem, StageTable(problem, mixes, held, longest))
        found = programme.decide(programme.no_limit(), 1, math.inf if best is None else deadline)
        if found is not None:
            best = quicker(best, evaluate(problem, programme.table.plan(found.counts)))
            _, best = _least_bound(programme, best, deadline, ROUGH)
        check(deadline)
        wanted = most if best is None else min(most, longest_stage(problem, best.line.makespan))
        if wanted <= longest:
            return programme, best
        longest = wanted if best else min(most, 2 * longest)


def longest_stage(problem: Problem, limit: float) -> int:
    """Layers of a stage at most, whichever they are, in a step of ``limit``."""
    each = [layer for layer in problem.layers for _ in range(layer.count)]
    forward = np.array([layer.forward for layer in each])
    backward = np.array([min(kind.backward for kind in layer.kinds.values()) for layer in each])
    everything = float((forward + backward).sum())
    for count in range(1, len(each) + 1):
        one, other, both = (
            np.convolve(x, np.ones(count), "valid").min() for x in (forward, backward, forward + backward)
        )
        least = max(problem.micro_batches * both, everything + (problem.micro_batches - 1) * max(one, other))
        if least > limit:
            return count - 1
    return len(each)


def _least_bound(
    programme: SplitProgram, best: Evaluation, deadline: float, precise: float = PRECISE
) -> tuple[float, Evaluation]:
    """The least step whose bounds can be kept, by bisection, and the best of ``best`` and the plans met on the way."""
    low, high, width = 0.0, best.line.makespan, NARROW
    while high - low > precise * high:
        middle = (low + high) / 2 if low else 0.75 * high
        try:
            found = programme.decide(middle, width, deadline)
        except OutOfTime:
            break
        if found is None:
            low = middle
            continue
        tried = evaluate(programme.problem, programme.table.plan(found.counts))
        best = quicker(best, tried)
        if tried.line.makespan > middle and found.merged and width < WIDE and time.monotonic() < deadline:
            width *= 4
        else:
            high = min(middle, tried.line.makespan)
    return low, best
