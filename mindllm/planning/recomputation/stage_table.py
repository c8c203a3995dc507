"""What each run of layers costs each stage with one chunk per stage: for given layers only the least backward time matters."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mindllm.deadline import check
from mindllm.planning.plan import Plan, activation_room, end_of, tail_working_memory
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Mixes, Runs
from mindllm.schedules.orders import Orders, alive


class StageTable:
    """Forward and least backward time of each stage for each run of layers; infinite if it does not fit the memory."""

    def __init__(self, problem: Problem, mixes: Mixes, alive: np.ndarray, longest: int) -> None:
        """Tabulate the runs of at most ``longest`` layers; stages keep ``alive`` micro-batches, ``[stages]``."""
        self.problem, self.mixes, self.alive = problem, mixes, alive
        self.longest = min(longest, problem.layer_count - problem.stages + 1)
        self._runs: dict[Runs, int] = {}
        layers = problem.layer_count
        self.run_of = np.full((layers, self.longest), -1)
        for start in range(layers):
            check(mixes.deadline)
            for count in range(1, min(self.longest, layers - start) + 1):
                self.run_of[start, count - 1] = self._runs.setdefault(mixes.runs(start, count), len(self._runs))

    @cached_property
    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward times, ``[stages, layers, longest]``: of ``count`` layers from one on at ``[.., count - 1]``."""
        by_run = np.array([
            [self._times(stage, runs) for runs in self._runs] + [(np.inf, np.inf)] for stage in range(self.problem.stages)
        ])  # fmt: skip
        check(self.mixes.deadline)
        both = by_run[:, self.run_of]
        return both[..., 0], both[..., 1]

    def _times(self, stage: int, runs: Runs) -> tuple[float, float]:
        best = self._best(stage, runs)
        forward = sum(self.problem.layers[kind].forward * count for kind, count in runs)
        ends = end_of(self.problem, stage)
        if best is None:
            return np.inf, np.inf
        return forward + sum(end.forward for end in ends), best[0] + sum(end.backward for end in ends)

    def _best(self, stage: int, runs: Runs) -> tuple[float, np.ndarray] | None:
        """Return the least backward time of the layers, and the counts of the mix."""
        problem, micro_batches = self.problem, int(self.alive[stage])
        ends = end_of(problem, stage)
        room = activation_room(problem, stage, runs) - micro_batches * sum(end.activation_mb for end in ends)
        return self.mixes.fastest(runs, micro_batches, room, tail_working_memory(problem, stage))

    def place(self, stage: int, start: int, count: int) -> tuple[str, ...]:
        """Return the kinds of ``count`` layers from ``start`` on with the least backward time; ValueError if they do not fit."""
        runs = self.mixes.runs(start, count)
        best = self._best(stage, runs)
        if best is None:
            raise ValueError(f"stage {stage} cannot hold {count} layers")
        return tuple(self.mixes.written(runs, best[1]))

    def plan(self, counts: list[int]) -> Plan:
        """Return the plan with these layers per stage and the least backward times."""
        starts = np.cumsum([0, *counts]).tolist()
        return Plan(tuple(self.place(stage, starts[stage], count) for stage, count in enumerate(counts)))


def live_micro_batches(orders: Orders) -> np.ndarray:
    """Return the largest number of live micro-batches on each stage, ``[stages]``."""
    return np.array([vectors.max() for vectors in alive(orders, 1)])
