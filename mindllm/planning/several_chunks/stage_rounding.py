"""Whole layers to recompute for a given split, one stage after another (relax and fix, Pochet and Wolsey 2006).

For given layers the program over paths says how long the backward pass of every place should take, recomputing fractions of
layers. A stage takes the mixes near that whose simulated step is least while the others are still as the program wants them; then
the program answers again, and the stages that are left make up for what was lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import highspy
import numpy as np

from mindllm.deadline import passed
from mindllm.planning.plan import Plan
from mindllm.planning.recomputation.stage_choice import NearChoices, StageChoice
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.schedules.simulate import step_times

CLOSE = 3e-4  # simulated and thought step of stages that are decided that count as equal
ROUNDS = 5  # paths looked for after each stage
SIMULATED = 128  # choices of a stage that are simulated, those that known paths promise most of
NUMBERS = 2**22  # end times that one simulation may hold
SWEEPS = 6  # over all stages of a plan that is whole already
BETTER = 1e-7


class StageRounding:
    """Uses ``program``, whose bounds on layers are those of the last split afterwards."""

    def __init__(self, program: PathProgram, choice: StageChoice, random: np.random.Generator) -> None:
        self.program, self.choice, self.random = program, choice, random
        self.simulated = max(4, min(SIMULATED, NUMBERS // program.table.size))

    def plan(self, totals: np.ndarray, in_order: bool, deadline: float) -> Plan | None:
        """A plan of a split, ``[places]``; None when that fits no memory or time is up.

        Args:
            totals: layers of each place.
            in_order: whether stages are decided from the first to the last; else in any order, another one every time.
            deadline: when to stop.
        """
        stages = np.arange(self.program.problem.stages)
        counts = self.program.by_kind(totals)
        self.program.limit_counts(counts, counts)
        try:
            found = self._decide(totals, stages if in_order else self.random.permutation(stages), deadline)
        finally:
            columns = self.program.backward_of.astype(np.int32)
            nothing = np.zeros(len(columns))
            self.program.solver.changeColsBounds(len(columns), columns, nothing, nothing + highspy.kHighsInf)
        if found is None:
            return None
        mixes, forward, backward = found
        self._sweep(totals, mixes, forward, backward, deadline)
        return self.choice.plan_of(totals, mixes)

    def _decide(
        self, totals: np.ndarray, order: Iterable[int], deadline: float
    ) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray, np.ndarray] | None:
        """The mixes of every stage, and the times of every place."""
        program = self.program
        bound, values = program.solve()
        mixes: list[tuple[np.ndarray, ...]] = [()] * program.problem.stages
        for stage in order:
            if not math.isfinite(bound) or passed(deadline):
                return None
            forward, backward = values[program.forward_of], values[program.backward_of]
            near = self.choice.near(stage, totals, backward)
            index, _ = self._best(stage, near, forward, backward)
            if index is None:
                return None
            mixes[stage] = near.mixes(index)
            for place, backward_time in zip(self._places(stage), near.backward[:, index], strict=True):
                program.solver.changeColBounds(int(program.backward_of[place]), backward_time, backward_time)
            bound, values = self._separated(deadline)
        return mixes, values[program.forward_of].copy(), values[program.backward_of].copy()

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
        forward: np.ndarray,
        backward: np.ndarray,
        deadline: float,
    ) -> None:
        """Changes the mixes of one stage at a time as long as the simulated step falls; in place."""
        best = self.program.simulated_step(forward, backward)
        better, sweeps = True, 0
        while better and sweeps < SWEEPS:
            better, sweeps = False, sweeps + 1
            for stage in self.random.permutation(self.program.problem.stages):
                if passed(deadline):
                    return
                near = self.choice.near(stage, totals, backward)
                index, step = self._best(stage, near, forward, backward, best)
                if index is not None and step < best * (1 - BETTER):
                    mixes[stage], backward[self._places(stage)] = near.mixes(index), near.backward[:, index]
                    best, better = self.program.simulated_step(forward, backward), True

    def _best(
        self, stage: int, near: NearChoices, forward: np.ndarray, backward: np.ndarray, below: float = math.inf
    ) -> tuple[int | None, float]:
        """The choice of a stage with the least simulated step, and that; None when none may be below ``below``."""
        places = self._places(stage)
        paths = self.program.known.values()
        visits = np.array([path[1][places] for path in paths]).reshape(len(paths), len(places))
        others = np.array([first @ forward + second @ backward + delay for first, second, delay in paths])
        others -= visits @ backward[places]
        thought = (others[:, None] + visits @ near.backward).max(axis=0, initial=0.0)
        tried = np.argsort(thought, kind="stable")[: self.simulated]
        tried = tried[thought[tried] < below]
        if not len(tried):
            return None, math.inf
        times = np.repeat(backward[:, None], len(tried), axis=1)
        times[places] = near.backward[:, tried]
        same = np.repeat(forward[:, None], len(tried), axis=1)
        steps = step_times(self.program.table, same, times, self.program.problem.point_to_point)
        return int(tried[steps.argmin()]), float(steps.min())

    def _places(self, stage: int) -> np.ndarray:
        return np.arange(stage, self.program.problem.places, self.program.problem.stages)
