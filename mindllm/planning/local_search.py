"""Local search over splits: layers are moved between places as long as the simulated step gets shorter.

Every simulated plan leaves its critical path behind. The sum along a path of one plan is a lower bound of any other plan's step,
so most neighbours are dismissed without being simulated.
"""

from __future__ import annotations

import numpy as np

from mindllm.deadline import OutOfTime, passed
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.stage_choice import StageChoice, one_shift, shifts
from mindllm.schedules.operations import BACKWARD, FORWARD
from mindllm.schedules.orders import Timetable
from mindllm.schedules.simulate import critical_path, simulate_times, step_times

BATCH = 64  # plans simulated together
NUMBERS = 2**23  # end times that one simulation may hold
KEPT = 400  # paths


class Paths:
    """Chains of operations as lower bounds: visits of each place by kind of operation, ``[paths, kinds, places]``, and delays."""

    def __init__(self, kinds: int, places: int) -> None:
        self.visits = np.zeros((0, kinds, places))
        self.delays = np.zeros(0)

    def add(self, visits: np.ndarray, delay: float) -> None:
        """Adds a path; the oldest is forgotten when there are many."""
        self.visits = np.concatenate([self.visits[-KEPT:], visits[None]])
        self.delays = np.append(self.delays[-KEPT:], delay)

    def bound(self, times: np.ndarray) -> np.ndarray:
        """The longest path of each plan, ``[plans]``, from times ``[kinds, places, plans]``."""
        return (np.tensordot(self.visits, times, 2) + self.delays[:, None]).max(axis=0)


class Search:
    """A search that keeps the best split it has seen."""

    def __init__(self, problem: Problem, choice: StageChoice, table: Timetable, seed: int = 0) -> None:
        self.problem, self.choice, self.table = problem, choice, table
        self.kinds = choice.kinds
        self.paths = Paths(self.kinds, problem.places)
        self.random = np.random.default_rng(seed)
        self.best: np.ndarray | None = None
        self.best_time = np.inf
        self.best_weights = choice.weights
        self._add_single_stage_paths()

    def _add_single_stage_paths(self) -> None:
        """Nothing but one stage is waited for: the first chunk before it, then all its passes.

        In a V gradients of weights may be the last of them, so the way back is not waited for.
        """
        stages, places = self.problem.stages, self.problem.places
        passes = np.bincount(self.table.what * places + self.table.place, minlength=self.kinds * places)
        for stage in range(stages):
            visits = np.zeros((self.kinds, places))
            visits[:, stage::stages] = passes.reshape(self.kinds, places)[:, stage::stages]
            visits[FORWARD, :stage] = 1
            if not self.problem.v_shape:
                visits[BACKWARD, :stage] = 1
            ways = 1 if self.problem.v_shape else 2
            self.paths.add(visits, ways * stage * self.problem.point_to_point)

    def times(self, counts: np.ndarray, below: float = np.inf, deadline: float = np.inf) -> np.ndarray:
        """Step time of each split, ``[splits]``; infinite where it does not fit or is not less than ``below``.

        After ``deadline`` no more splits are simulated: theirs are infinite, too.
        """
        found = np.full(len(counts), np.inf)
        try:
            times = self.choice.times(counts, deadline)
        except OutOfTime:
            return found
        fits = np.isfinite(times[FORWARD]).all(axis=0)
        bound = np.full(len(counts), np.inf)
        bound[fits] = self.paths.bound(times[..., fits])
        order = np.argsort(bound)
        delay = self.problem.point_to_point
        batch = max(1, min(BATCH, NUMBERS // self.table.size))
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            part = part[bound[part] < below]
            if not len(part) or passed(deadline):
                break
            found[part] = step_times(self.table, times[..., part], delay)
            leader = part[found[part].argmin()]
            below = min(below, found[leader])
            self._learn(times[..., leader])
        leader = int(found.argmin())
        if found[leader] < self.best_time:
            self.best, self.best_time, self.best_weights = counts[leader].copy(), found[leader], self.choice.weights
        return found

    def _learn(self, times: np.ndarray) -> None:
        line = simulate_times(self.table, times, self.problem.point_to_point)
        visits, crossings = critical_path(line, self.problem.point_to_point)
        self.paths.add(visits[: self.kinds], crossings * self.problem.point_to_point)

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
            passed = self.paths.visits[-20:, FORWARD + 1 :].sum(axis=1).mean(axis=0)
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
