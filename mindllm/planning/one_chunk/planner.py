"""Planning with one chunk per stage: the step has a closed form, whose least value over all splits is found by bisection.

For a step to beat, a dynamic programme finds a split that keeps to it or proves that there is none (``split_program.py``). Splits
that it finds are simulated; without delays the closed forms are exact, so plan and bound meet, of 1F1B where the programme minds
every chain, which it does when fewer do not suffice. Where they do not meet, because partial plans had to be merged or because
delays make other chains longer, a local search improves the plan.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np

from mindllm.deadline import OutOfTime, check, now, passed
from mindllm.planning.local_search import Search
from mindllm.planning.one_chunk.closed_form import EveryChain, GPipe, OneFOneB
from mindllm.planning.one_chunk.split_program import SplitProgram
from mindllm.planning.plan import Evaluation, Plan, evaluate, is_long, problem_orders, quickest
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.recomputation.stage_table import StageTable, held_micro_batches
from mindllm.schedules.orders import timetable
from mindllm.schedules.steady import NotSteady

PRECISE = 1e-7  # to which the bound is searched
ROUNDING = 1e-9  # of sums of layers
ROUGH = 1e-3  # to which it is searched to know how many layers a stage can have
NARROW, WIDE = 64, 4096  # partial plans kept, at first and where that does not suffice
WANDER = 8.0  # seconds of local search where bound and plan do not meet
CLOSE = 0.01  # a gap above which the search goes on as long as it may


def solve_one_chunk(
    problem: Problem, even: Evaluation | None, deadline: float, first: float
) -> tuple[Evaluation | None, float]:
    """The best plan found, None without one, and a lower bound of the makespan: 0 without one, infinite when no plan exists.

    ``first`` is the deadline of a first plan where the ``even`` split is none.
    """
    found = _OneChunk(problem, even, deadline, first)
    low = 0.0
    with contextlib.suppress(OutOfTime):
        programme = found.programme()
        low = found.least_bound(programme)
        if isinstance(programme, OneFOneB) and not problem.point_to_point and not found.meets(low):
            low = found.least_bound(EveryChain(problem, programme.table), low=low)
        found.wander(low)
    return found.best, low


class _OneChunk:
    """The bisection and the local search, which keep the ``best`` plan they have seen."""

    def __init__(self, problem: Problem, even: Evaluation | None, deadline: float, first: float) -> None:
        self.problem, self.best, self.deadline = problem, even, deadline
        self.mixes = Mixes(problem, first)

    def judge(self, plan: Plan) -> float:
        """The step of a plan, which may be the best; infinite where it cannot be told.

        Raises:
            NotSteady: it cannot, and there is no other plan.
        """
        try:
            tried = evaluate(self.problem, plan, self.mixes.deadline)
        except NotSteady:
            if self.best is None:
                raise
            return math.inf
        self.best = quickest(self.best, tried)
        return tried.line.makespan

    def programme(self) -> SplitProgram:
        """The programme with all stages that a plan no worse than the best can have.

        Raises:
            OutOfTime: it was not known at the deadline.
        """
        problem = self.problem
        kind = GPipe if problem.schedule == "gpipe" else OneFOneB
        held, most = held_micro_batches(problem_orders(problem)), problem.layer_count - problem.stages + 1
        longest = min(most, math.ceil(problem.layer_count / problem.stages * 1.5) + 2)
        while True:
            programme = kind(problem, StageTable(problem, self.mixes, held, longest))
            found = programme.decide(programme.no_limit(), 1, self.mixes.deadline)
            if found is not None:
                self.judge(programme.table.plan(found.counts))
                self.mixes.deadline = self.deadline
                self.least_bound(programme, ROUGH)
            check(self.mixes.deadline)
            wanted = most if self.best is None else min(most, longest_stage(problem, self.best.line.makespan))
            if wanted <= longest:
                return programme
            longest = wanted if self.best else min(most, 2 * longest)

    def meets(self, low: float) -> bool:
        """Whether there is no plan, or the best is the lower bound."""
        return self.best is None or self.best.line.makespan <= low * (1 + 10 * PRECISE)

    def least_bound(self, programme: SplitProgram, precise: float = PRECISE, low: float = 0.0) -> float:
        """The least step whose bounds can be kept, by bisection from ``low``; infinite where there is no plan.

        Judges splits on the way.
        """
        if self.best is None:
            return math.inf
        high, width = self.best.line.makespan, NARROW
        while high - low > precise * high:
            middle = (low + high) / 2 if low else 0.75 * high
            try:
                found = programme.decide(middle, width, self.deadline)
                if found is None:
                    low = middle
                    continue
                step = self.judge(programme.table.plan(found.counts))
            except OutOfTime:
                break
            if step > middle and found.merged and width < WIDE and not passed(self.deadline):
                width *= 4
            else:
                high = min(middle, step)
        return low

    def wander(self, low: float) -> None:
        """A local search where the best plan is above the bound and few enough micro-batches can be simulated."""
        problem = self.problem
        if self.meets(low) or self.best is None or is_long(problem):
            return
        orders = problem_orders(problem)
        search = Search(problem, StageChoice(problem, self.mixes, orders), timetable(orders, 1))
        search.descend(np.array(self.best.plan.counts), self.deadline)
        search.wander(min(self.deadline, now() + WANDER), low)
        search.wander(self.deadline, low * (1 + CLOSE))
        if search.best is not None:
            self.judge(search.choice.plan(search.best))


def longest_stage(problem: Problem, limit: float) -> int:
    """Layers of a stage at most, whichever they are, in a step of ``limit``."""
    each = [problem.layers[kind] for kind in problem.layer_order]
    forward = np.array([layer.forward for layer in each])
    backward = np.array([min(kind.backward for kind in layer.kinds.values()) for layer in each])
    sums = np.pad(np.cumsum([forward, backward, forward + backward], axis=1), ((0, 0), (1, 0)))
    everything = float(sums[2, -1])
    for count in range(1, len(each) + 1):
        one, other, both = (sums[:, count:] - sums[:, :-count]).min(axis=1)
        least = max(problem.micro_batches * both, everything + (problem.micro_batches - 1) * max(one, other))
        if least > limit * (1 + ROUNDING):
            return count - 1
    return len(each)
