"""The linear program over paths: a lower bound of every plan's step under any order of operations, solved by HiGHS.

Unknown are how many layers of each place recompute what; the step is at least the sum along each known path. Paths are those
that the simulator finds critical for the program's own answers (cuts), so the bound rises to that of the whole event graph. Whole
layers are then asked for: with a step to beat, the program says between which numbers the layers of each place and stage lie;
whole numbers between them are fewer, and when none are left, no plan beats that step.
"""

from __future__ import annotations

import math
import time

import highspy
import numpy as np

from toolkit.pipeline_balance.plan import end_of
from toolkit.pipeline_balance.problem import Problem
from toolkit.pipeline_balance.schedule import Timetable, alive
from toolkit.pipeline_balance.search import Paths
from toolkit.pipeline_balance.simulate import critical_path, simulate
from toolkit.pipeline_balance.stage_floor import Floor, StageFloor, hull

CLOSE = 1e-3  # a simulated step this near to the bound ends the search for paths
SLACK = 1e-6


class PathProgram:
    """Columns: layers by place, layer kind and recompute kind, then layers of each place, then the step."""

    def __init__(self, problem: Problem, table: Timetable) -> None:
        self.problem, self.table = problem, table
        self.columns = [
            (place, layer, kind)
            for place in range(problem.places)
            for layer in range(len(problem.layers))
            for kind in problem.layers[layer].kinds
        ]
        size = len(self.columns)
        self.layers_of = size + np.arange(problem.places)
        self.step = size + problem.places
        self.place = np.array([place for place, _, _ in self.columns])
        self.layer = np.array([layer for _, layer, _ in self.columns])
        costs = [problem.layers[layer].kinds[kind] for _, layer, kind in self.columns]
        self.activation = np.array([cost.activation_mb for cost in costs])
        self.forward = np.array([problem.layers[layer].forward for layer in self.layer])
        self.backward = np.array([cost.backward for cost in costs])
        self.ends = [end_of(problem, place) for place in range(problem.places)]
        self.fixed_forward = np.array([sum(end.forward for end in ends) for ends in self.ends])
        self.fixed_backward = np.array([sum(end.backward for end in ends) for ends in self.ends])
        self.solver = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("threads", 1)
        self._build()

    def _build(self) -> None:
        problem, infinity = self.problem, highspy.kHighsInf
        most = problem.layer_count - problem.places + 1
        for _ in self.columns:
            self.solver.addVar(0, infinity)
        for _ in range(problem.places):
            self.solver.addVar(1, most)
        self.solver.addVar(0, infinity)
        self.solver.changeColCost(self.step, 1.0)
        for index, layer in enumerate(problem.layers):
            self._row(layer.count, layer.count, np.flatnonzero(self.layer == index), 1.0)
        for place in range(problem.places):
            mine = np.flatnonzero(self.place == place)
            self._row(0, 0, np.append(mine, self.layers_of[place]), np.append(np.ones(len(mine)), -1))
        for stage, vectors in enumerate(alive(self.table.orders, problem.chunks)):
            self._memory_rows(stage, vectors)
        self.stage_rows = []
        self.stage_counts: list[int] = []
        self.known: set[bytes] = set()
        for stage in range(problem.stages):
            self.stage_rows.append(self.solver.getNumRow())
            self._row(problem.chunks, infinity, self.layers_of[stage :: problem.stages], 1.0)

    def _memory_rows(self, stage: int, vectors: np.ndarray) -> None:
        problem = self.problem
        limit = problem.per_stage("limit_mb")[stage]
        if math.isinf(limit):
            return
        least = min(kind.transient_mb for layer in problem.layers for kind in layer.kinds.values())
        room = limit - sum(problem.per_stage(key)[stage] for key in ("static_mb", "transient_mb")) - least
        mine = np.flatnonzero(self.place % problem.stages == stage)
        places = range(stage, problem.places, problem.stages)
        room -= sum(end.memory_mb for place in places for end in self.ends[place])
        parameter = np.array([layer.parameter_mb for layer in problem.layers])[self.layer[mine]]
        for vector in vectors:
            kept = sum(vector[c] * end.activation_mb for c, place in enumerate(places) for end in self.ends[place])
            held = vector[self.place[mine] // problem.stages] * self.activation[mine]
            self._row(-highspy.kHighsInf, room - kept, mine, held + parameter)

    def _row(self, low: float, high: float, columns: np.ndarray, values: np.ndarray | float) -> None:
        values = np.broadcast_to(np.asarray(values, float), columns.shape)
        used = values != 0
        self.solver.addRow(low, high, int(used.sum()), columns[used].astype(np.int32), values[used].copy())

    def add_path(self, forward: np.ndarray, backward: np.ndarray, delay: float) -> None:
        """The step is at least the sum along this path, unless that is known; visits of each place, ``[places]``."""
        key = np.concatenate([forward, backward]).astype(int).tobytes()
        if key in self.known:
            return
        self.known.add(key)
        values = forward[self.place] * self.forward + backward[self.place] * self.backward
        fixed = float(forward @ self.fixed_forward + backward @ self.fixed_backward) + delay
        columns = np.append(np.arange(len(self.columns)), self.step)
        self._row(-highspy.kHighsInf, -fixed, columns, np.append(values, -1.0))

    def solve(self) -> tuple[float, np.ndarray]:
        """The least step, infinite when there is no answer, and the value of every column."""
        self.solver.run()
        if self.solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return math.inf, np.zeros(self.step + 1)
        return self.solver.getInfo().objective_function_value, np.array(self.solver.getSolution().col_value)

    def times(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward time of each place of an answer."""
        given = values[: len(self.columns)]
        places = self.problem.places
        forward = np.bincount(self.place, given * self.forward, places) + self.fixed_forward
        return forward, np.bincount(self.place, given * self.backward, places) + self.fixed_backward

    def find_paths(self, paths: Paths, until: float) -> tuple[float, np.ndarray | None]:
        """Adds critical paths of its own answers until the bound is met; returns it and layers per place, if any."""
        for visits in list(zip(paths.forward, paths.backward, paths.delays, strict=True)):
            self.add_path(*visits)
        bound, values = self.solve()
        centre, centre_time = values, math.inf
        while math.isfinite(bound) and time.monotonic() < until:
            for share in (1.0, 0.5, 0.2):  # the answer itself, and on the way to it from the best so far
                point = centre + share * (values - centre)
                found = self._separate(point, paths)
                if found < centre_time:
                    centre, centre_time = point, found
            if centre_time <= bound * (1 + CLOSE):
                break
            bound, values = self.solve()
        return bound, values[self.layers_of] if math.isfinite(bound) else None

    def _separate(self, point: np.ndarray, paths: Paths) -> float:
        delay = self.problem.point_to_point
        line = simulate(self.table, *self.times(point), delay=delay)
        forward, backward, crossings = critical_path(line, delay)
        self.add_path(forward, backward, crossings * delay)
        paths.add(forward, backward, crossings * delay)
        return line.makespan

    def ask_for_whole_layers(self, target: float, until: float) -> None:
        """Adds, for plans whose step is below ``target`` alone, what whole layers take of each stage."""
        problem = self.problem
        quickest = min(layer.forward + min(c.backward for c in layer.kinds.values()) for layer in problem.layers)
        for stage in range(problem.stages):
            fixed = self.fixed_forward + self.fixed_backward
            before = stage * (quickest + 2 * problem.point_to_point) + float(fixed[:stage].sum())
            latest = (target - before) / problem.micro_batches - float(fixed[stage :: problem.stages].sum())
            for index, layer in enumerate(problem.layers):
                average = layer.count / problem.stages
                floor = StageFloor(problem, self.table.orders, stage, index)
                found = floor.until(latest, math.ceil(0.8 * average), until)
                if found is not None:
                    self._floor_rows(stage, index, *found)

    def _floor_rows(self, stage: int, layer: int, floor: Floor, most: int) -> None:
        """Bounds the time of a stage's layers by their number, which is a column of its own."""
        mine = np.flatnonzero((self.place % self.problem.stages == stage) & (self.layer == layer))
        number = self.solver.getNumCol()
        self.solver.addVar(0, most)
        self.stage_counts.append(number)
        self._row(0, 0, np.append(mine, number), np.append(np.ones(len(mine)), -1.0))
        times = self.forward[mine] + self.backward[mine]
        for slope, intercept in hull(floor):
            self._row(intercept - SLACK, highspy.kHighsInf, np.append(mine, number), np.append(times, -slope))

    def whole_stage_bound(self, bound: float, paths: Paths, until: float) -> float:
        """A lower bound with a whole number of layers on each stage; paths of its answers are added until none is new."""
        for number in self.stage_counts:
            self.solver.changeColIntegrality(number, highspy.HighsVarType.kInteger)
        while self.stage_counts and time.monotonic() < until:
            self.solver.setOptionValue("time_limit", self.solver.getRunTime() + until - time.monotonic())
            self.solver.run()
            info = self.solver.getInfo()
            if self.solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
                bound = math.inf
                break
            bound = max(bound, info.mip_dual_bound)
            if self.solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                break
            if self._separate(np.array(self.solver.getSolution().col_value), paths) <= bound * (1 + CLOSE):
                break
        self.solver.setOptionValue("time_limit", highspy.kHighsInf)
        for number in self.stage_counts:
            self.solver.changeColIntegrality(number, highspy.HighsVarType.kContinuous)
        return bound

    def beaten(self, target: float, until: float) -> bool:
        """Whether it proves that no plan's step is below ``target``; False when it cannot tell in time."""
        solver, problem = self.solver, self.problem
        most = problem.layer_count - problem.places + 1
        solver.changeColBounds(self.step, 0, target)
        try:
            return self._tighten(until)
        finally:
            solver.changeColBounds(self.step, 0, highspy.kHighsInf)
            for place in range(problem.places):
                solver.changeColBounds(int(self.layers_of[place]), 1, most)
            for row in self.stage_rows:
                solver.changeRowBounds(row, problem.chunks, highspy.kHighsInf)

    def _tighten(self, until: float) -> bool:
        """Rounds the least and most layers of stages and places inwards, until nothing changes or nothing is left."""
        groups = [(row, self.layers_of[stage :: self.problem.stages]) for stage, row in enumerate(self.stage_rows)] + [
            (None, self.layers_of[place : place + 1]) for place in range(self.problem.places)
        ]
        limits: list[tuple[float, float]] = [(-math.inf, math.inf)] * len(groups)
        self.solver.changeColCost(self.step, 0.0)
        try:
            changed = True
            while changed:
                changed = False
                for index, (row, columns) in enumerate(groups):
                    if time.monotonic() > until:
                        return False
                    low, high = self._extreme(columns, 1), self._extreme(columns, -1)
                    if low is None or high is None:
                        return True
                    limit = (math.ceil(low - SLACK), math.floor(-high + SLACK))
                    if limit[0] > limit[1]:
                        return True
                    if limit != limits[index]:
                        changed = (
                            changed or limits[index] != (-math.inf, math.inf) or limit[0] > low or limit[1] < -high
                        )
                        limits[index] = limit
                        if row is None:
                            self.solver.changeColBounds(int(columns[0]), *limit)
                        else:
                            self.solver.changeRowBounds(row, *limit)
            return False
        finally:
            self.solver.changeColCost(self.step, 1.0)

    def _extreme(self, columns: np.ndarray, sign: int) -> float | None:
        """The least of ``sign`` times the sum of columns; None when no answer is left."""
        for column in columns:
            self.solver.changeColCost(int(column), float(sign))
        self.solver.run()
        status, value = self.solver.getModelStatus(), self.solver.getInfo().objective_function_value
        for column in columns:
            self.solver.changeColCost(int(column), 0.0)
        return None if status == highspy.HighsModelStatus.kInfeasible else value
