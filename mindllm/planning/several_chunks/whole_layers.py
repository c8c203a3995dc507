"""A lower bound of plans with whole numbers of layers by mixed-integer programs over the paths known so far (HiGHS).

The split of each answer is judged by the linear program, and the paths that show what it really takes are rows of the next
question (Benders' decomposition, with paths for its cuts). A question with few paths is answered quickly, and its bound holds as
a lower bound of all plans. When no split can be better than the best one judged, recomputation becomes whole, too.
"""

from __future__ import annotations

import math
import time

import highspy
import numpy as np

from mindllm.planning.deadline import run_until
from mindllm.planning.several_chunks.layer_box import Box
from mindllm.planning.several_chunks.path_program import PathProgram

CLOSE = 3e-4  # simulated and thought step of a split that count as equal
NEARER = 1e-4  # share by which a split must be better than the best one judged
LOOSE, TIGHT = 1e-2, 2e-4  # gaps within which a question is answered
OF_WHAT_IS_OPEN = 0.25  # the gap as a share of what is between the bound and the best
SAME = 1e-5  # share by which steps differ that are the same
SAFE = 1e-6  # share by which HiGHS may overstate a bound
PATHS, TOO_MANY, NEWEST = 350, 600, 250  # kept, known at most, and kept because they are new
FIRST_SECONDS = 2.0  # for a question; twice as long after one that had no answer


class WholeLayers:
    """Uses ``program`` alone, whose bounds on layers are those of ``box``.

    Attributes:
        bound: of all plans in the box; no more than ``enough``, which ends the proof.
        ended: whether nothing is left that might raise it.
    """

    def __init__(self, program: PathProgram, box: Box, enough: float) -> None:
        self.program, self.box, self.enough = program, box, enough
        self.bound, self.ended = 0.0, False
        self.least = math.inf  # the step of the best split judged, later of the best plan
        self.recomputation = False  # whether that is whole, too
        self.seconds = FIRST_SECONDS
        layers = [*program.counts_of.ravel(), *program.stage_counts]
        self.layers = np.array(layers, np.int32)
        self.mixed = np.arange(len(program.columns), dtype=np.int32)

    def ask(self, deadline: float) -> np.ndarray | None:
        """Asks one question for at most some seconds; returns the layers of each place of its answer, if there is one."""
        program, solver = self.program, self.program.solver
        limit = min(self.enough, self.least * (1 - NEARER))
        self.box.apply_to(program)
        self._make_whole(True)
        try:
            solver.changeColBounds(program.step, 0, limit)
            gap = np.clip(OF_WHAT_IS_OPEN * (limit / max(self.bound, 1e-9) - 1), TIGHT, LOOSE)
            solver.setOptionValue("mip_rel_gap", float(gap))
            run_until(solver, min(deadline, time.monotonic() + self.seconds))
            status, info = solver.getModelStatus(), solver.getInfo()
            answered = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
            thought, dual = info.objective_function_value, info.mip_dual_bound
            values = np.array(solver.getSolution().col_value)
        finally:
            solver.changeColBounds(program.step, 0, highspy.kHighsInf)
            self._make_whole(False)
        if status == highspy.HighsModelStatus.kInfeasible:
            self._raise(limit)
            self.ended = self.recomputation or limit >= self.enough
            self.recomputation, self.least = True, math.inf
            return None
        if math.isfinite(dual):
            self._raise(min(dual * (1 - SAFE), limit))
        if status != highspy.HighsModelStatus.kOptimal:
            self.seconds *= 2
        if not answered:
            return None
        known = len(program.known)
        split, step = self._judged(values, deadline)
        # an answer whose split is known has its layers out of order, and would come again
        self.ended = len(program.known) == known and step > thought * (1 + SAME)
        if len(program.known) > TOO_MANY:
            self._forget()
        return split

    def _raise(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def _make_whole(self, whole: bool) -> None:
        kind = highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous
        for columns in (self.layers, self.mixed) if self.recomputation else (self.layers,):
            self.program.solver.changeColsIntegrality(len(columns), columns, np.array([kind] * len(columns)))

    def _judged(self, values: np.ndarray, deadline: float) -> tuple[np.ndarray, float]:
        """Adds the path of an answer that is a plan, or the paths of its split; returns the split and the step of either."""
        program = self.program
        split = np.rint(program.totals(values)).astype(int)
        if self.recomputation:
            step, _ = program.separate(values)
            self.least = min(self.least, step)
            return split, step
        counts = program.by_kind(split)
        program.limit_counts(counts, counts)
        step, _ = program.find_paths(deadline, CLOSE)
        self.least = min(self.least, step)
        return split, step

    def _forget(self) -> None:
        """Forgets paths that are old and far from the step of the whole box."""
        self.box.apply_to(self.program)
        self.program.solve()
        far = np.argsort(self.program.slack())[PATHS - NEWEST :]
        self.program.forget_paths(far[far < len(self.program.known) - NEWEST])
