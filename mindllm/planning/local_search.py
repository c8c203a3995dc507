"""Local search over splits: move layers between places as long as the simulated step gets shorter.

The critical path of every simulated plan is remembered. The sum along a path of one plan is a lower bound of the step of any
other plan, so most neighbors are dismissed without a simulation.
"""

from __future__ import annotations

import numpy as np

from mindllm.deadline import OutOfTime, passed
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.stage_choice import StageChoice, random_shift, shifts
from mindllm.schedules.operations import BACKWARD, FORWARD
from mindllm.schedules.orders import Timetable
from mindllm.schedules.simulate import critical_path, simulate_times, step_times

BATCH = 64  # plans simulated together
NUMBERS = 2**23  # end times that one simulation may hold
MOST_PATHS = 400


class Paths:
    """Chains of operations as lower bounds: visits of each place by kind of operation, ``[paths, kinds, places]``, and delays."""

    def __init__(self, kinds: int, places: int) -> None:
        self.visits = np.zeros((0, kinds, places))
        self.delays = np.zeros(0)

    def add(self, visits: np.ndarray, delay: float) -> None:
        """Add a path; forget the oldest if there are too many."""
        self.visits = np.concatenate([self.visits[-MOST_PATHS:], visits[None]])
        self.delays = np.append(self.delays[-MOST_PATHS:], delay)

    def bound(self, times: np.ndarray) -> np.ndarray:
        """Return the longest path of each plan, ``[plans]``, from times ``[kinds, places, plans]``."""
        return (np.tensordot(self.visits, times, 2) + self.delays[:, None]).max(axis=0)


class Search:
    """A search that remembers the best split."""

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
        """Add the paths through a single stage: the first chunk before it, all its passes, and the way back.

        In a V a stage may end with weight gradients, so the way back is left out.
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
        """Return the step time of each split, ``[splits]``; infinite if it does not fit or is not less than ``below``.

        Splits that are not simulated before ``deadline`` are infinite, too.
        """
        steps = np.full(len(counts), np.inf)
        try:
            times = self.choice.times(counts, deadline)
        except OutOfTime:
            return steps
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
            steps[part] = step_times(self.table, times[..., part], delay)
            leader = part[steps[part].argmin()]
            below = min(below, steps[leader])
            self._learn(times[..., leader])
        leader = int(steps.argmin())
        if steps[leader] < self.best_time:
            self.best, self.best_time, self.best_weights = counts[leader].copy(), steps[leader], self.choice.weights
        return steps

    def _learn(self, times: np.ndarray) -> None:
        line = simulate_times(self.table, times, self.problem.point_to_point)
        visits, crossings = critical_path(line, self.problem.point_to_point)
        self.paths.add(visits[: self.kinds], crossings * self.problem.point_to_point)

    def descend(self, counts: np.ndarray, deadline: float) -> tuple[np.ndarray, float]:
        """Move one layer at a time while that helps, until ``deadline``."""
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
        """Weigh the chunks of a stage as in the best plan, or by their visits on recent critical paths."""
        if self.problem.chunks == 1:
            return
        share = self.random.choice((0.0, 0.3, 0.8))
        if share:
            passed = self.paths.visits[-20:, FORWARD + 1 :].sum(axis=1).mean(axis=0)
            self.choice.weigh(1 - share + share * passed / passed.mean())
        elif self.choice.weights is not self.best_weights:
            self.choice.weigh(self.best_weights)

    def wander(self, deadline: float, target: float) -> None:
        """Restart near the best split until ``deadline`` or until ``target`` is reached."""
        while self.best is not None and not passed(deadline) and self.best_time > target * (1 + 1e-9):
            self._weigh()
            counts = self.best.copy()
            for _ in range(int(self.random.integers(2, 6))):
                counts = random_shift(counts, self.random)
            if np.isfinite(self.times(counts[None], deadline=deadline)[0]):
                self.descend(counts, deadline)
