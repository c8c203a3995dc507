"""How long whole layers occupy a stage at least: small integer programs, one for each number of layers on a stage.

The linear program over paths may split layers and recompute parts of them. For a step to beat, a stage can hold no more layers
than fit its memory and finish in time; between the numbers that remain, the least time of whole layers is a bound of the stage.
"""

from __future__ import annotations

import itertools
import math

import highspy
import numpy as np

from mindllm.deadline import passed
from mindllm.planning.highs import new_solver, run_until
from mindllm.planning.plan import end_of, fullest_moments
from mindllm.planning.problem import Problem
from mindllm.schedules.orders import Orders

EMPTY = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
"""States of a program without an answer: these programs are never unbounded."""
Floor = list[tuple[int, float]]  # numbers of layers, rising, and the least time of a micro-batch's passes through them


class StageFloor:
    """Least times of the layers of one kind on one stage, for any split over its chunks and any recomputation that fits."""

    def __init__(self, problem: Problem, orders: Orders, stage: int, layer: int) -> None:
        self.problem, self.stage = problem, stage
        self.layer = problem.layers[layer]
        costs = list(self.layer.kinds.values())
        self.columns = [(chunk, cost) for chunk in range(problem.chunks) for cost in costs]
        self.solver = new_solver()
        for number, (_, cost) in enumerate(self.columns):
            self.solver.addVar(0, highspy.kHighsInf)
            self.solver.changeColIntegrality(number, highspy.HighsVarType.kInteger)
            self.solver.changeColCost(number, self.layer.forward + cost.backward)
        every = np.arange(len(self.columns), dtype=np.int32)
        self.solver.addRow(0, 0, len(every), every, np.ones(len(every)))
        if len(problem.layers) == 1:
            for chunk in range(problem.chunks):
                mine = np.array(
                    [n for n, (column_chunk, _) in enumerate(self.columns) if column_chunk == chunk], np.int32
                )
                self.solver.addRow(1, highspy.kHighsInf, len(mine), mine, np.ones(len(mine)))
        self._memory_rows(orders, every)

    def _memory_rows(self, orders: Orders, every: np.ndarray) -> None:
        problem, stage = self.problem, self.stage
        limit = problem.per_stage("limit_mb")[stage]
        if math.isinf(limit):
            return
        room = (
            limit - least_working(problem) - sum(problem.per_stage(key)[stage] for key in ("static_mb", "transient_mb"))
        )
        ends = [(c, end) for c in range(problem.chunks) for end in end_of(problem, c * problem.stages + stage)]
        room -= sum(end.memory_mb for _, end in ends)
        most = problem.full_activation_mb[problem.layers.index(self.layer)]
        for vector, full in fullest_moments(problem, orders, stage):
            end_memory = sum((vector + full)[chunk] * end.activation_mb for chunk, end in ends)
            use = np.array([
                vector[c] * cost.activation_mb + full[c] * most + self.layer.parameter_mb for c, cost in self.columns
            ], float)  # fmt: skip
            self.solver.addRow(-highspy.kHighsInf, room - end_memory, len(every), every, use)

    def least(self, count: int, deadline: float = math.inf) -> float:
        """Return the least time of ``count`` layers, or a lower bound of it at ``deadline``; infinite if they do not fit."""
        self.solver.changeRowBounds(0, count, count)
        run_until(self.solver, deadline)
        if self.solver.getModelStatus() in EMPTY:
            return math.inf
        return max(0.0, self.solver.getInfo().mip_dual_bound)

    def times_below(self, latest: float, first: int, deadline: float) -> tuple[Floor, int] | None:
        """Return the times from ``first`` layers on up to ``latest``, and the largest possible count; None when out of time."""
        times: Floor = [(0, 0.0)]
        for count in range(max(first, 1), self.layer.count + 1):
            if passed(deadline):
                return None
            least = self.least(count, deadline)
            if least > latest:
                return times, count - 1
            times.append((count, least))
        return times, self.layer.count


def least_working(problem: Problem) -> float:
    """Return the least working memory of the backward pass through any place in addition to :func:`fullest_moments`, in MB."""
    return min(
        max(0.0, cost.transient_mb - problem.v_shape * (full - cost.activation_mb))
        for layer, full in zip(problem.layers, problem.full_activation_mb, strict=True)
        for cost in layer.kinds.values()
    )


def hull(points: Floor) -> list[tuple[float, float]]:
    """Return slope and intercept of the lines below the points that touch two of them."""
    corners: list[tuple[float, float]] = []
    for x, y in points:
        while len(corners) > 1 and (corners[-1][1] - corners[-2][1]) * (x - corners[-2][0]) >= (y - corners[-2][1]) * (
            corners[-1][0] - corners[-2][0]
        ):
            corners.pop()
        corners.append((x, y))
    return [
        ((y1 - y0) / (x1 - x0), y0 - (y1 - y0) / (x1 - x0) * x0) for (x0, y0), (x1, y1) in itertools.pairwise(corners)
    ]
