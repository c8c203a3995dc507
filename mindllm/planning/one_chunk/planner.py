"""Planning with one chunk per stage: the step has a closed form, whose least value over all splits is found by bisection.

For a step to beat, a dynamic program finds a split that keeps to it or proves that there is none (``split_program.py``). Splits
that it finds are simulated; without delays the closed forms are exact, so plan and bound meet, of 1F1B where the program minds
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
from mindllm.planning.recomputation.stage_table import StageTable, live_micro_batches
from mindllm.schedules.orders import timetable
from mindllm.schedules.steady import NotSteady

PRECISE = 1e-7  # to which the bound is searched
ROUNDING = 1e-9  # of sums of layers
ROUGH = 1e-3  # to which it is searched to know how many layers a stage can have
NARROW, WIDE = 64, 4096  # partial plans kept, at first and if those do not suffice
WANDER = 8.0  # seconds of local search where bound and plan do not meet
CLOSE = 0.01  # a gap above which the search uses all its time


def solve_one_chunk(
    problem: Problem, even: Evaluation | None, deadline: float, first: float
) -> tuple[Evaluation | None, float]:
    """Return the best plan, None without one, and a lower bound of the makespan: 0 without one, infinite if no plan exists.

    ``first`` is the deadline of a first plan if there is no ``even`` split.
    """
    solver = _OneChunk(problem, even, deadline, first)
    low = 0.0
    with contextlib.suppress(OutOfTime):
        program = solver.program()
        low = solver.least_bound(program)
        if isinstance(program, OneFOneB) and not problem.point_to_point and not solver.meets(low):
            low = solver.least_bound(EveryChain(problem, program.table), low=low)
        solver.wander(low)
    return solver.best, low


class _OneChunk:
    """Bisection and local search, which remember the ``best`` plan."""

    def __init__(self, problem: Problem, even: Evaluation | None, deadline: float, first: float) -> None:
        self.problem, self.best, self.deadline = problem, even, deadline
        self.mixes = Mixes(problem, first)

    def judge(self, plan: Plan) -> float:
        """Return the step of a plan, and remember it if it is the best; infinite if it is not steady.

        Raises:
            NotSteady: it is not steady, and there is no other plan.
        """
        try:
            tried = evaluate(self.problem, plan, self.mixes.deadline)
        except NotSteady:
            if self.best is None:
                raise
            return math.inf
        self.best = quickest(self.best, tried)
        return tried.line.makespan

    def program(self) -> SplitProgram:
        """Return the program with all stages that a plan at least as good as the best can have.

        Raises:
            OutOfTime: it was not complete before the deadline.
        """
        problem = self.problem
        kind = GPipe if problem.schedule == "gpipe" else OneFOneB
        alive, most = live_micro_batches(problem_orders(problem)), problem.layer_count - problem.stages + 1
        longest = min(most, math.ceil(problem.layer_count / problem.stages * 1.5) + 2)
        while True:
            program = kind(problem, StageTable(problem, self.mixes, alive, longest))
            result = program.decide(program.upper_bound(), 1, self.mixes.deadline)
            if result is not None:
                self.judge(program.table.plan(result.counts))
                self.mixes.deadline = self.deadline
                self.least_bound(program, ROUGH)
            check(self.mixes.deadline)
            needed = most if self.best is None else min(most, longest_stage(problem, self.best.line.makespan))
            if needed <= longest:
                return program
            longest = needed if self.best else min(most, 2 * longest)

    def meets(self, low: float) -> bool:
        """Return True if there is no plan, or the best plan meets the lower bound."""
        return self.best is None or self.best.line.makespan <= low * (1 + 10 * PRECISE)

    def least_bound(self, program: SplitProgram, precise: float = PRECISE, low: float = 0.0) -> float:
        """Return the least step that is not refuted, by bisection from ``low``; infinite if there is no plan.

        Splits found by the bisection are simulated.
        """
        if self.best is None:
            return math.inf
        high, width = self.best.line.makespan, NARROW
        while high - low > precise * high:
            middle = (low + high) / 2 if low else 0.75 * high
            try:
                result = program.decide(middle, width, self.deadline)
                if result is None:
                    low = middle
                    continue
                step = self.judge(program.table.plan(result.counts))
            except OutOfTime:
                break
            if step > middle and result.merged and width < WIDE and not passed(self.deadline):
                width *= 4
            else:
                high = min(middle, step)
        return low

    def wander(self, low: float) -> None:
        """Search locally if the best plan is above the bound and can be simulated as a whole."""
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
    """Return the largest number of layers of a stage, whichever they are, in a step of ``limit``."""
    each = [problem.layers[kind] for kind in problem.layer_order]
    forward = np.array([layer.forward for layer in each])
    backward = np.array([min(kind.backward for kind in layer.kinds.values()) for layer in each])
    sums = np.pad(np.cumsum([forward, backward, forward + backward], axis=1), ((0, 0), (1, 0)))
    everything = float(sums[2, -1])
    for count in range(1, len(each) + 1):
        forward_least, backward_least, both = (sums[:, count:] - sums[:, :-count]).min(axis=1)
        least = max(
            problem.micro_batches * both, everything + (problem.micro_batches - 1) * max(forward_least, backward_least)
        )
        if least > limit * (1 + ROUNDING):
            return count - 1
    return len(each)
