"""Local search over splits: layers are moved between places as long as the simulated step gets shorter.

Every simulated plan leaves its critical path behind. The sum along a path of one plan is a lower bound of any other plan's step,
so most neighbours are dismissed without being simulated.
"""

from __future__ import annotations

import numpy as np

from mindllm.deadline import OutOfTime, passed
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.stage_choice import StageChoice, one_shift, shifts
from mindllm.schedules.orders import Timetable
from mindllm.schedules.simulate import critical_path, simulate, step_times

BATCH = 64  # plans simulated together
NUMBERS = 2**23  # end times that one simulation may hold
KEPT = 400  # paths


class Paths:
    """Chains of operations as lower bounds: visits of forward and backward passes of each place, and delays."""

    def __init__(self, places: int) -> None:
        self.forward = np.zeros((0, places))
        self.backward = np.zeros((0, places))
        self.delays = np.zeros(0)

    def add(self, forward: np.ndarray, backward: np.ndarray, delay: float) -> None:
        """Adds a path; the oldest is forgotten when there are many."""
        self.forward = np.vstack([self.forward[-KEPT:], forward])
        self.backward = np.vstack([self.backward[-KEPT:], backward])
        self.delays = np.append(self.delays[-KEPT:], delay)

    def bound(self, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """The longest path of each plan, ``[plans]``, from times ``[places, plans]``."""
        return (self.forward @ forward + self.backward @ backward + self.delays[:, None]).max(axis=0)


class Search:
    """A search that keeps the best split it has seen."""

    def __init__(self, problem: Problem, choice: StageChoice, table: Timetable, seed: int = 0) -> None:
        self.problem, self.choice, self.table = problem, choice, table
        self.paths = Paths(problem.places)
        self.random = np.random.default_rng(seed)
        self.best: np.ndarray | None = None
        self.best_time = np.inf
        self.best_weights = choice.weights
        self._add_single_stage_paths()

    def _add_single_stage_paths(self) -> None:
        """Nothing but one stage is waited for: the first chunk before it, then all its passes."""
        stages, places = self.problem.stages, self.problem.places
        for stage in range(stages):
            visits = np.zeros(places)
            visits[stage::stages] = self.problem.micro_batches
            visits[:stage] = 1
            self.paths.add(visits, visits, 2 * stage * self.problem.point_to_point)

    def times(self, counts: np.ndarray, below: float = np.inf, deadline: float = np.inf) -> np.ndarray:
        """Step time of each split, ``[splits]``; infinite where it does not fit or is not less than ``below``.

        After ``deadline`` no more splits are simulated: theirs are infinite, too.
        """
        found = np.full(len(counts), np.inf)
        try:
            forward, backward = self.choice.times(counts, deadline)
        except OutOfTime:
            return found
        fits = np.isfinite(forward).all(axis=0)
        bound = np.full(len(counts), np.inf)
        bound[fits] = self.paths.bound(forward[:, fits], backward[:, fits])
        order = np.argsort(bound)
        delay = self.problem.point_to_point
        batch = max(1, min(BATCH, NUMBERS // self.table.size))
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            part = part[bound[part] < below]
            if not len(part) or passed(deadline):
                break
            found[part] = step_times(self.table, forward[:, part], backward[:, part], delay)
            leader = part[found[part].argmin()]
            below = min(below, found[leader])
            self._learn(forward[:, leader], backward[:, leader])
        leader = int(found.argmin())
        if found[leader] < self.best_time:
            self.best, self.best_time, self.best_weights = counts[leader].copy(), found[leader], self.choice.weights
        return found

    def _learn(self, forward: np.ndarray, backward: np.ndarray) -> None:
        line = simulate(self.table, forward, backward, delay=self.problem.point_to_point)
        first, second, crossings = critical_path(line, self.problem.point_to_point)
        self.paths.add(first, second, crossings * self.problem.point_to_point)

    def descend(self, counts: np.ndarray, deadline: float) -> tuple[np.ndarray, float]:
        """Moves one layer at a time while that helps, until ``deadline``."""
        current = self.times(counts[None], deadline=deadline)[0]
        while not passed(deadline):
            neighbours = shifts(counts, self.random)
            if not len(neighbours):
                break
            times = self.times(neighbours, current, deadline)
            leader = times.argmin()
            if not times[leader] < current * (1 - 1e-12):
                break
            counts, current = neighbours[leader], times[leader]
        return counts, current

    def _weigh(self) -> None:
        """Has chunks of a stage share its memory as in the best plan, or by how often recent critical paths pass them."""
        if self.problem.chunks == 1:
            return
        share = self.random.choice((0.0, 0.3, 0.8))
        if share:
            passed = self.paths.backward[-20:].mean(axis=0)
            self.choice.weigh(1 - share + share * passed / passed.mean())
        elif self.choice.weights is not self.best_weights:
            self.choice.weigh(self.best_weights)

    def wander(self, deadline: float, target: float) -> None:
        """Starts again near the best split, over and over, until ``deadline`` or until ``target`` is reached."""
        while self.best is not None and not passed(deadline) and self.best_time > target * (1 + 1e-9):
            self._weigh()
            counts = self.best.copy()
            for _ in range(int(self.random.integers(2, 6))):
                counts = one_shift(counts, self.random)
            if np.isfinite(self.times(counts[None], deadline=deadline)[0]):
                self.descend(counts, deadline)
