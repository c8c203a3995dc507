"""Better plans by exact answers to smaller problems.

Fractions of layers are rounded one after another, recomputation is chosen for given layers, and a few stages are replanned while
the others stay (large-neighborhood search, Shaw 1998). Each problem is a mixed-integer program over known paths (HiGHS). Its
answer is simulated. If the simulation takes longer, the critical path is a new row, and the program is solved again.

Whole layers to recompute are chosen for a given split, one stage after another (relax and fix, Pochet and Wolsey 2006). The
program over paths gives the time of the backward pass of every place, with fractions of layers. A stage takes the mixes near
that time with the least simulated step, while the others stay fractional. The program is then solved again, so that the
remaining stages compensate for the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import highspy
import numpy as np

from mindllm.deadline import now, passed
from mindllm.planning.highs import run_until
from mindllm.planning.plan import Evaluation, Plan, evaluate
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import NearChoices, StageChoice
from mindllm.planning.several_chunks.path_program import Path, PathProgram
from mindllm.schedules.operations import BACKWARD
from mindllm.schedules.simulate import step_times

CLOSE = 3e-4  # by which simulated and estimated steps count as equal
ROUNDS = 5  # paths looked for after each stage
SIMULATED = 128  # most promising choices of a stage, which are simulated
NUMBERS = 2**22  # end times that one simulation may hold
SWEEPS = 6  # over all stages of a rounded plan
BETTER_STAGE = 1e-7
BETTER = 1e-6  # share of the step by which a plan must be shorter to count
ENOUGH = 5e-4  # gap at which a question is answered
SECONDS = 4.0  # for a question
ROUGH = 2e-3  # precision of paths before layers are rounded


class StageRounding:
    """Rounding of recomputation with ``program``; its bounds on layers are those of the last split afterwards."""

    def __init__(self, program: PathProgram, choice: StageChoice, random: np.random.Generator) -> None:
        self.program, self.choice, self.random = program, choice, random
        self.simulated = max(4, min(SIMULATED, NUMBERS // program.table.size))

    def plan(self, totals: np.ndarray, in_order: bool, deadline: float) -> Plan | None:
        """Return a plan of a split; None if it does not fit the memory or time is up.

        Args:
            totals: layers of each place, ``[places]``.
            in_order: decide stages from the first to the last; otherwise in a random order.
            deadline: when to stop.
        """
        stages = np.arange(self.program.problem.stages)
        counts = self.program.by_kind(totals)
        self.program.limit_counts(counts, counts)
        try:
            decided = self._decide(totals, stages if in_order else self.random.permutation(stages), deadline)
        finally:
            columns = self.program.time_of[BACKWARD:].ravel().astype(np.int32)
            zeros = np.zeros(len(columns))
            self.program.solver.changeColsBounds(len(columns), columns, zeros, zeros + highspy.kHighsInf)
        if decided is None:
            return None
        mixes, times = decided
        self._sweep(totals, mixes, times, deadline)
        return self.choice.build_plan(totals, mixes)

    def _decide(
        self, totals: np.ndarray, order: Iterable[int], deadline: float
    ) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray] | None:
        """Return the mixes of every stage, and the times of every place by kind of operation, ``[kinds, places]``."""
        program = self.program
        bound, values = program.solve()
        mixes: list[tuple[np.ndarray, ...]] = [()] * program.problem.stages
        for stage in order:
            if not math.isfinite(bound) or passed(deadline):
                return None
            times = values[program.time_of]
            near = self.choice.near(stage, totals, times[BACKWARD])
            index, _ = self._best(stage, near, times)
            if index is None:
                return None
            mixes[stage] = near.mixes(index)
            chosen = program.time_of[BACKWARD:, self._places(stage)].ravel()
            for column, time in zip(chosen, near.times[BACKWARD:, :, index].ravel(), strict=True):
                program.solver.changeColBounds(int(column), time, time)
            bound, values = self._separated(deadline)
        return mixes, values[program.time_of].copy()

    def _separated(self, deadline: float) -> tuple[float, np.ndarray]:
        bound, values = self.program.solve()
        for _ in range(ROUNDS - 1):
            if not math.isfinite(bound) or passed(deadline):
                break
            simulated, new = self.program.separate(values)
            if simulated <= bound * (1 + CLOSE) or not new:
                break
            bound, values = self.program.solve()
        return bound, values

    def _sweep(
        self,
        totals: np.ndarray,
        mixes: list[tuple[np.ndarray, ...]],
        times: np.ndarray,
        deadline: float,
    ) -> None:
        """Change the mixes of one stage at a time as long as the simulated step falls; in place."""
        best = self.program.simulated_step(times)
        better, sweeps = True, 0
        while better and sweeps < SWEEPS:
            better, sweeps = False, sweeps + 1
            for stage in self.random.permutation(self.program.problem.stages):
                if passed(deadline):
                    return
                near = self.choice.near(stage, totals, times[BACKWARD])
                index, step = self._best(stage, near, times, best)
                if index is not None and step < best * (1 - BETTER_STAGE):
                    mixes[stage], times[:, self._places(stage)] = near.mixes(index), near.times[..., index]
                    best, better = self.program.simulated_step(times), True

    def _best(
        self, stage: int, near: NearChoices, times: np.ndarray, below: float = math.inf
    ) -> tuple[int | None, float]:
        """Return the choice of a stage with the least simulated step, and that step; None if none may be below ``below``."""
        places = self._places(stage)
        paths, shape = self.program.known.values(), (*times[BACKWARD:, places].shape,)
        visits = np.array([path[BACKWARD:, places] for path, _ in paths]).reshape(len(paths), *shape)
        rest = np.array([np.vdot(path, times) + delay for path, delay in paths])
        rest -= np.tensordot(visits, times[BACKWARD:, places], 2)
        thought = (rest[:, None] + np.tensordot(visits, near.times[BACKWARD:], 2)).max(axis=0, initial=0.0)
        tried = np.argsort(thought, kind="stable")[: self.simulated]
        tried = tried[thought[tried] < below]
        if not len(tried):
            return None, math.inf
        every = np.repeat(times[..., None], len(tried), axis=-1)
        every[BACKWARD:, places] = near.times[BACKWARD:, :, tried]
        steps = step_times(self.program.table, every, self.program.problem.point_to_point)
        return int(tried[steps.argmin()]), float(steps.min())

    def _places(self, stage: int) -> np.ndarray:
        return np.arange(stage, self.program.problem.places, self.program.problem.stages)


class Reoptimiser:
    """Replanning of parts, which remembers the ``best`` plan."""

    def __init__(self, program: PathProgram, mixes: Mixes) -> None:
        self.program, self.mixes, self.problem = program, mixes, program.problem
        self.best: Evaluation | None = None
        solver = program.solver
        solver.setOptionValue("mip_rel_gap", ENOUGH)
        self.mixed = np.arange(len(program.columns), dtype=np.int32)
        integer = [highspy.HighsVarType.kInteger] * len(self.mixed)
        solver.changeColsIntegrality(len(self.mixed), self.mixed, np.array(integer))
        for column in program.counts_of.ravel():
            solver.changeColIntegrality(int(column), highspy.HighsVarType.kInteger)

    @property
    def best_time(self) -> float:
        """The step of the best plan; infinite without one."""
        return self.best.line.makespan if self.best else math.inf

    def offer(self, plan: Plan) -> bool:
        """Take a plan that fits and is better than the best; return True if it was taken."""
        tried = evaluate(self.problem, plan)
        if not tried.fits or not tried.line.makespan < self.best_time * (1 - BETTER):
            return False
        self.best = tried
        return True

    def know(self, paths: Iterable[Path]) -> None:
        """Replace the known paths of the program."""
        self.program.forget_paths(np.arange(len(self.program.known)))
        for visits in paths:
            self.program.add_path(*visits)

    def choose_recomputation(self, totals: np.ndarray, deadline: float) -> bool:
        """Choose the best recomputation for given layers of each place, ``[places]``; return True if it is optimal."""
        counts = self.program.by_kind(totals)
        self.program.limit_counts(counts, counts)
        self._limit_mixed(np.zeros(len(self.mixed)), np.full(len(self.mixed), highspy.kHighsInf))
        return self._ask(deadline)

    def replan(self, places: np.ndarray, deadline: float) -> bool:
        """Replan some places of the best plan; return True if they cannot be planned better."""
        assert self.best is not None
        free = np.isin(np.arange(self.problem.places), places)
        counts = self.program.by_kind(np.array(self.best.plan.counts))
        low, high = self.program.any_counts()
        self.program.limit_counts(np.where(free[:, None], low, counts), np.where(free[:, None], high, counts))
        now = self._mixed(self.best.plan)
        moving = free[self.program.place]
        self._limit_mixed(np.where(moving, 0, now), np.where(moving, highspy.kHighsInf, now))
        return self._ask(deadline)

    def _limit_mixed(self, low: np.ndarray, high: np.ndarray) -> None:
        self.program.solver.changeColsBounds(len(self.mixed), self.mixed, low.astype(float), high.astype(float))

    def _ask(self, deadline: float) -> bool:
        """Solve the open part until simulation and program agree, and return True; False if time is up."""
        program, solver = self.program, self.program.solver
        latest, deadline = deadline, min(deadline, now() + SECONDS)
        while not passed(deadline):
            if math.isfinite(self.best_time):
                solver.changeColBounds(program.step, 0, self.best_time * (1 - BETTER))
            run_until(solver, deadline, latest)
            if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
                return True
            if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
                return False
            thought = solver.getInfo().objective_function_value
            values = np.array(solver.getSolution().col_value)
            mixed = np.rint(values[: len(self.mixed)])
            plan = self._plan(mixed)
            if plan is not None:
                self.offer(plan)
            simulated, new = program.separate(values)
            if not new or simulated <= thought * (1 + ENOUGH):
                return solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return False

    def _mixed(self, plan: Plan) -> np.ndarray:
        """Return the layers of each column of the program in a plan."""
        order, numbers = self.problem.layer_order, self.problem.layer_numbers(plan.counts)
        columns = {column: index for index, column in enumerate(self.program.columns)}
        layers = np.zeros(len(self.mixed))
        for place, names in enumerate(plan.places):
            for number, name in zip(numbers[place], names, strict=True):
                layers[columns[place, order[number], name]] += 1
        return layers

    def _plan(self, mixed: np.ndarray) -> Plan | None:
        """Return the plan of an answer, or the fastest expressible one instead; None if its layers are out of order."""
        problem, names = self.problem, self.problem.kind_names
        counts = np.zeros((problem.places, len(problem.layers), len(names)), int)
        for (place, layer, kind), number in zip(self.program.columns, mixed, strict=True):
            counts[place, layer, names.index(kind)] += int(number)
        by_kind = counts.sum(axis=2)
        if (by_kind != self.program.by_kind(by_kind.sum(axis=1))).any():
            return None
        places = []
        for mine in counts:
            runs = tuple((layer, int(number)) for layer, number in enumerate(mine.sum(axis=1)) if number)
            try:
                places.append(tuple(self.mixes.written(runs, mine)))
            except ValueError:
                if (instead := self.mixes.instead(runs, mine)) is None:
                    return None
                places.append(tuple(self.mixes.written(runs, instead)))
        return Plan(tuple(places))


def dive(program: PathProgram, random: np.random.Generator, deadline: float) -> np.ndarray | None:
    """Round answers of the program to whole layers of each place, a few places at a time; None if that fails."""
    program.limit_counts(*program.any_counts())
    bound, values = program.find_paths(deadline, ROUGH)
    totals = program.totals(values)
    low, high = np.ones(len(totals), int), np.full(len(totals), program.most)
    try:
        while (low < high).any():
            if passed(deadline) or not math.isfinite(bound):
                return None
            undecided = np.flatnonzero(low < high)
            doubt = np.abs(totals[undecided] - np.rint(totals[undecided])) + 0.1 * random.random(len(undecided))
            sure = undecided[doubt.argsort()[: max(1, len(totals) // 10)]]
            low[sure] = high[sure] = np.rint(totals[sure])
            program.limit_totals(low, high)
            bound, values = program.solve()
            if not math.isfinite(bound):
                return None
            program.separate(values)
            totals = program.totals(values)
        return low
    finally:
        program.limit_totals(1, program.most)
