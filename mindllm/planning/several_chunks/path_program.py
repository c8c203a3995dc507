"""The linear program over paths: a lower bound of every plan's step under any order of operations, solved by HiGHS.

Unknown are how many layers of each place recompute what; the step is at least the sum along each known path. Paths are those
that the simulator finds critical for the program's own answers (cuts), so the bound rises to that of the whole event graph.
"""

from __future__ import annotations

import math

import highspy
import numpy as np

from mindllm.deadline import check, passed
from mindllm.planning.highs import new_solver, run_until
from mindllm.planning.plan import end_of, fullest_moments
from mindllm.planning.problem import Problem
from mindllm.planning.several_chunks.stage_floor import EMPTY, Floor, StageFloor, hull, least_working
from mindllm.schedules.operations import BACKWARD, FORWARD, KINDS
from mindllm.schedules.orders import Timetable
from mindllm.schedules.simulate import critical_path, pass_times, simulate_times

CLOSE = 1e-3  # a simulated step this near to the bound ends the search for paths
SLACK = 1e-6
END_TIMES = ("forward", "backward", "weight_gradient")

Path = tuple[np.ndarray, float]  # visits by kind of operation and place, delay of its tensors


class PathProgram:
    """Columns: layers by place, layer kind and recompute kind, the same summed, times of each place, then the step.

    Attributes:
        columns: place, index of the layer kind and recompute kind of each of the first columns.
        time_of: the column of the time of each kind of operation in each place, ``[kinds, places]``.
        deadline: after which no answer is looked for.
        counts_of: the column of the number of layers of each kind in each place, ``[places, layer kinds]``.
        stage_counts, stage_kinds: columns of the number of layers of one kind on one stage, and which kind that is.
    """

    def __init__(self, problem: Problem, table: Timetable) -> None:
        self.problem, self.table = problem, table
        kinds = len(problem.layers)
        self.columns = [
            (place, layer, kind)
            for place in range(problem.places)
            for layer in range(kinds)
            for kind in problem.layers[layer].kinds
        ]
        size = len(self.columns)
        self.counts_of = size + np.arange(problem.places * kinds).reshape(problem.places, kinds)
        operations = KINDS if problem.v_shape else 2
        self.time_of = size + self.counts_of.size + np.arange(operations * problem.places).reshape(operations, -1)
        self.step = int(self.time_of[-1, -1]) + 1
        self.place = np.array([place for place, _, _ in self.columns])
        self.layer = np.array([layer for _, layer, _ in self.columns])
        costs = [problem.layers[layer].kinds[kind] for _, layer, kind in self.columns]
        self.activation = np.array([cost.activation_mb for cost in costs])
        again = np.array([problem.again[layer, problem.kind_names.index(kind)] for _, layer, kind in self.columns])
        weight = again + [problem.layers[layer].weight_gradient for layer in self.layer]
        forward = np.array([problem.layers[layer].forward for layer in self.layer])
        backward = np.array([cost.backward for cost in costs])
        self.times = pass_times(forward, backward, weight, again)[:operations]  # of a layer, by column
        self.ends = [end_of(problem, place) for place in range(problem.places)]
        self.fixed = pass_times(*(self._end_times(key) for key in END_TIMES))[:operations]
        self.solver = new_solver()
        self.known: dict[bytes, Path] = {}
        self.deadline = math.inf
        self._build()

    def _end_times(self, key: str) -> np.ndarray:
        """Return a time of head and tail by place."""
        return np.array([sum(getattr(end, key) for end in ends) for ends in self.ends], float)

    def _build(self) -> None:
        problem, infinity = self.problem, highspy.kHighsInf
        for _ in self.columns:
            self.solver.addVar(0, infinity)
        for layer in problem.layers * problem.places:
            self.solver.addVar(0, min(layer.count, self.most))
        for _ in range(self.time_of.size + 1):
            self.solver.addVar(0, infinity)
        self.solver.changeColCost(self.step, 1.0)
        for index, layer in enumerate(problem.layers):
            self._row(layer.count, layer.count, self.counts_of[:, index], 1.0)
            for place in range(problem.places):
                mine = np.flatnonzero((self.place == place) & (self.layer == index))
                self._sum(mine, np.ones(len(mine)), self.counts_of[place, index], 0)
        self.total_rows = self.solver.getNumRow() + np.arange(problem.places)
        for place in range(problem.places):
            self._row(1, self.most, self.counts_of[place], 1.0)
        for place in range(problem.places):
            mine = np.flatnonzero(self.place == place)
            for times, columns, fixed in zip(self.times, self.time_of, self.fixed, strict=True):
                self._sum(mine, times[mine], columns[place], fixed[place])
        for stage in range(problem.stages):
            self._memory_rows(stage)
        self.stage_counts: list[int] = []
        self.stage_kinds: list[int] = []

    @property
    def most(self) -> int:
        """Layers that a place can hold at most, as every other needs one."""
        return self.problem.layer_count - self.problem.places + 1

    def _sum(self, columns: np.ndarray, factors: np.ndarray, total: int, fixed: float) -> None:
        """Add a row that makes column ``total`` the sum of others and a constant."""
        self._row(-fixed, -fixed, np.append(columns, total), np.append(factors, -1.0))

    def _memory_rows(self, stage: int) -> None:
        problem = self.problem
        limit = problem.per_stage("limit_mb")[stage]
        if math.isinf(limit):
            return
        least = least_working(problem)
        room = limit - sum(problem.per_stage(key)[stage] for key in ("static_mb", "transient_mb")) - least
        mine = np.flatnonzero(self.place % problem.stages == stage)
        places = range(stage, problem.places, problem.stages)
        room -= sum(end.memory_mb for place in places for end in self.ends[place])
        parameter = np.array([layer.parameter_mb for layer in problem.layers])[self.layer[mine]]
        chunk, full_activation = (
            self.place[mine] // problem.stages,
            np.array(problem.full_activation_mb)[self.layer[mine]],
        )
        for vector, full in fullest_moments(problem, self.table.orders, stage):
            every = vector + full
            end_memory = sum(every[c] * end.activation_mb for c, place in enumerate(places) for end in self.ends[place])
            layer_memory = vector[chunk] * self.activation[mine] + full[chunk] * full_activation
            self._row(-highspy.kHighsInf, room - end_memory, mine, layer_memory + parameter)

    def _row(self, low: float, high: float, columns: np.ndarray, values: np.ndarray | float) -> None:
        values = np.broadcast_to(np.asarray(values, float), columns.shape)
        used = values != 0
        self.solver.addRow(low, high, int(used.sum()), columns[used].astype(np.int32), values[used].copy())

    def add_path(self, visits: np.ndarray, delay: float) -> bool:
        """Require the step to be at least the sum along a path, ``[kinds, places]`` visits; return False if it is known."""
        key = visits.astype(int).tobytes()
        if key in self.known:
            return False
        self.known[key] = visits, delay
        columns = np.append(self.time_of.ravel(), self.step)
        self._row(-highspy.kHighsInf, -delay, columns, np.append(visits.ravel(), -1.0))
        return True

    def limit_totals(self, low: np.ndarray | int, high: np.ndarray | int) -> None:
        """Bound the layers of each place, ``[places]``."""
        low, high = (np.broadcast_to(np.asarray(each, float), self.total_rows.shape) for each in (low, high))
        for row, least, most in zip(self.total_rows, low, high, strict=True):
            self.solver.changeRowBounds(row, least, most)

    def limit_counts(self, low: np.ndarray, high: np.ndarray) -> None:
        """Bound the layers of each kind in each place, ``[places, layer kinds]``."""
        columns = self.counts_of.ravel().astype(np.int32)
        self.solver.changeColsBounds(len(columns), columns, low.ravel().astype(float), high.ravel().astype(float))

    def any_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds for :meth:`limit_counts` that every plan meets, ``[places, layer kinds]``."""
        kinds = np.array([min(layer.count, self.most) for layer in self.problem.layers])
        return np.zeros(self.counts_of.shape, int), np.tile(kinds, (self.problem.places, 1))

    def stage_limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds of ``stage_counts``."""
        model = self.solver.getLp()
        return np.array(model.col_lower_)[self.stage_counts], np.array(model.col_upper_)[self.stage_counts]

    def limit_stages(self, low: np.ndarray, high: np.ndarray) -> None:
        """Bound ``stage_counts``."""
        columns = np.array(self.stage_counts, np.int32)
        self.solver.changeColsBounds(len(columns), columns, np.asarray(low, float), np.asarray(high, float))

    def by_kind(self, totals: np.ndarray) -> np.ndarray:
        """Return layers of each kind in each place, ``[places, layer kinds]``, from the ``totals`` of places in model order."""
        sizes = np.array([layer.count for layer in self.problem.layers])
        ends, order = sizes.cumsum(), list(self.problem.visits)
        after = np.clip(np.asarray(totals)[order].cumsum()[:, None] - (ends - sizes), 0, sizes)
        counts = np.empty(after.shape, int)
        counts[order] = np.diff(after, axis=0, prepend=0)
        return counts

    def solve(self) -> tuple[float, np.ndarray]:
        """Return the least step and the value of every column; the step is infinite without an answer, 0 if none was computed.

        Raises:
            OutOfTime: there was no answer before ``deadline``.
        """
        run_until(self.solver, self.deadline)
        if self.solver.getModelStatus() not in (highspy.HighsModelStatus.kOptimal, *EMPTY):
            check(self.deadline)
            self.solver.clearSolver()  # numerical trouble on the way from the last answer
            run_until(self.solver, self.deadline)
            check(self.deadline)
        status = self.solver.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            return math.inf if status in EMPTY else 0.0, np.zeros(self.solver.getNumCol())
        return self.solver.getInfo().objective_function_value, np.array(self.solver.getSolution().col_value)

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Return the layers of each place in an answer, ``[places]``."""
        return values[self.counts_of].sum(axis=1)

    def separate(self, values: np.ndarray) -> tuple[float, bool]:
        """Simulate an answer and add its critical path; return the simulated step, and True if the path is new."""
        paths_before = len(self.known)
        step = self.simulated_step(values[self.time_of])
        return step, len(self.known) > paths_before

    def simulated_step(self, times: np.ndarray) -> float:
        """Return the step for given times of places, ``[kinds, places]``, and add its critical path."""
        delay = self.problem.point_to_point
        line = simulate_times(self.table, times, delay)
        visits, crossings = critical_path(line, delay)
        self.add_path(visits[: len(times)], crossings * delay)
        return line.makespan

    def find_paths(self, deadline: float, close: float = CLOSE) -> tuple[float, np.ndarray]:
        """Add critical paths of the program's own answers until the bound is met; return the bound and the last answer."""
        bound, values = self.solve()
        centre, centre_time = values, math.inf
        while math.isfinite(bound) and not passed(deadline):
            new = False
            for share in (1.0, 0.5, 0.2):  # the answer itself, and on the way to it from the best so far
                point = centre + share * (values - centre)
                simulated, added = self.separate(point)
                new |= added
                if simulated < centre_time:
                    centre, centre_time = point, simulated
            if centre_time <= bound * (1 + close) or not new:
                break
            bound, values = self.solve()
        return bound, values

    def slack(self) -> np.ndarray:
        """Return how much shorter each known path is than the step of the last answer, ``[paths]``."""
        first = self.solver.getNumRow() - len(self.known)
        return (np.array(self.solver.getLp().row_upper_) - np.array(self.solver.getSolution().row_value))[first:]

    def near_paths(self, most: int) -> list[Path]:
        """Return the ``most`` paths that are nearest to the step of the last answer."""
        paths = list(self.known.values())
        return [paths[index] for index in np.argsort(self.slack())[:most]]

    def forget_paths(self, indices: np.ndarray) -> None:
        """Forget the known paths at these indices."""
        first = self.solver.getNumRow() - len(self.known)
        indices = np.sort(indices)
        self.solver.deleteRows(len(indices), (indices + first).astype(np.int32))
        keys = list(self.known)
        for index in indices:
            del self.known[keys[index]]

    def forget_slack_paths(self, most: int) -> None:
        """Keep only the ``most`` paths that are nearest to the step of the last answer."""
        self.forget_paths(np.argsort(self.slack())[most:])

    def add_stage_floors(self, target: float, deadline: float) -> None:
        """Add the times of whole layers on each stage for plans with a step below ``target``; call it before adding paths."""
        problem = self.problem
        passes = (FORWARD,) if problem.v_shape else (FORWARD, BACKWARD)  # a V may end with gradients of weights
        quickest = sum(float(self.times[kind].min()) for kind in passes)
        fixed = self.fixed[FORWARD] + self.fixed[BACKWARD]
        for stage in range(problem.stages):
            before = stage * (quickest + len(passes) * problem.point_to_point)
            before += float(self.fixed[list(passes), :stage].sum())
            latest = (target - before) / problem.passes - float(fixed[stage :: problem.stages].sum())
            for index, layer in enumerate(problem.layers):
                average = layer.count / problem.stages
                floor = StageFloor(problem, self.table.orders, stage, index)
                times = floor.times_below(latest, math.ceil(0.8 * average), deadline)
                if times is not None:
                    self._floor_rows(stage, index, *times)

    def _floor_rows(self, stage: int, layer: int, floor: Floor, most: int) -> None:
        """Bound the time of a stage's layers by their count, which gets a column."""
        mine = np.flatnonzero((self.place % self.problem.stages == stage) & (self.layer == layer))
        number = self.solver.getNumCol()
        self.solver.addVar(0, most)
        self.stage_counts.append(number)
        self.stage_kinds.append(layer)
        self._row(0, 0, np.append(mine, number), np.append(np.ones(len(mine)), -1.0))
        times = self.times[FORWARD, mine] + self.times[BACKWARD, mine]
        for slope, intercept in hull(floor):
            self._row(intercept - SLACK, highspy.kHighsInf, np.append(mine, number), np.append(times, -slope))
