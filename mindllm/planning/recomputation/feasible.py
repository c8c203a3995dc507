"""Memory for a problem that no plan fits: the smallest limit, by a mixed-integer program over the lightest recomputation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import highspy
import numpy as np

from mindllm.deadline import OutOfTime, check
from mindllm.planning.highs import new_solver, run_until
from mindllm.planning.plan import end_of, fixed_memory, problem_orders, tail_working_memory
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.schedules.orders import alive_in_backward


@dataclass(frozen=True)
class Lightest:
    """The split that needs the least memory beyond the limits.

    Attributes:
        missing_mb: by how much every limit would have to grow for it to fit; zero where it fits.
        stage: the stage that needs it most.
        counts: layers of each place, ``[places]``.
    """

    missing_mb: float
    stage: int
    counts: np.ndarray


def lightest_split(problem: Problem, deadline: float = math.inf) -> Lightest:
    """Return the split that needs the least memory; exact if one recompute kind is lightest in all respects.

    Raises:
        OutOfTime: there was no answer before ``deadline``.
    """
    solver = new_solver()
    infinity, kinds, places = highspy.kHighsInf, len(problem.layers), problem.places
    missing = places * kinds
    switches = missing + 1  # columns: whether layers of a kind may be in a place, because earlier kinds are used up
    limits = problem.per_stage("limit_mb")
    for place in range(places):
        for layer in problem.layers:
            solver.addVar(0, layer.count)
            solver.changeColIntegrality(place * kinds + problem.layers.index(layer), highspy.HighsVarType.kInteger)
    solver.addVar(0, infinity)
    solver.changeColCost(missing, 1.0)
    for index, layer in enumerate(problem.layers):
        columns = np.arange(index, places * kinds, kinds, dtype=np.int32)
        solver.addRow(layer.count, layer.count, places, columns, np.ones(places))
    for place in range(places):
        columns = np.arange(place * kinds, (place + 1) * kinds, dtype=np.int32)
        solver.addRow(1, infinity, kinds, columns, np.ones(kinds))
    if kinds > 1:
        _keep_order(solver, problem, switches, deadline)
    rows = []
    for stage in range(problem.stages):
        check(deadline)
        rows += _memory_rows(problem, stage)
    for stage, fixed, factors in rows:
        if np.isfinite(limits[stage]):
            columns = np.append(np.flatnonzero(factors), missing).astype(np.int32)
            values = np.append(factors[factors != 0], -1.0)
            solver.addRow(-infinity, limits[stage] - fixed, len(columns), columns, values)
    run_until(solver, deadline, deadline)
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise OutOfTime
    answer = np.array(solver.getSolution().col_value)
    counts = np.rint(answer[:missing]).astype(int).reshape(places, kinds).sum(axis=1)
    # the exact memory of the mixes of this split
    more, stage = StageChoice(problem, Mixes(problem, deadline), problem_orders(problem)).missing(counts)
    return Lightest(max(0.0, more), stage, counts)


def _keep_order(solver: highspy.Highs, problem: Problem, switches: int, deadline: float) -> None:
    """Allow layers of a kind in a place only if no later place has layers of an earlier kind."""
    kinds, infinity = len(problem.layers), highspy.kHighsInf
    for _ in range(problem.places * (kinds - 1)):
        solver.addVar(0, 1)
        solver.changeColIntegrality(solver.getNumCol() - 1, highspy.HighsVarType.kInteger)
    for position, place in enumerate(problem.visits):
        check(deadline)
        for kind in range(1, kinds):
            switch = switches + place * (kinds - 1) + kind - 1
            count = float(problem.layers[kind].count)
            pair = np.array([place * kinds + kind, switch], np.int32)
            solver.addRow(-infinity, 0, 2, pair, np.array([1.0, -count]))
            for later in problem.visits[position + 1 :]:
                for earlier in range(kind):
                    pair = np.array([later * kinds + earlier, switch], np.int32)
                    limit = float(problem.layers[earlier].count)
                    solver.addRow(-infinity, limit, 2, pair, np.array([1.0, limit]))


def _memory_rows(problem: Problem, stage: int) -> list[tuple[int, float, np.ndarray]]:
    """Return a row for every largest set of live micro-batches: the stage, MB without layers, MB of a layer in each place.

    The layer that goes backward first may be of a kind that keeps more, and needs less working memory for it.
    """
    orders = problem_orders(problem)
    kinds, places = len(problem.layers), range(stage, problem.places, problem.stages)
    base = sum(problem.per_stage(key)[stage] for key in ("static_mb", "transient_mb"))
    base += sum(end.memory_mb for place in places for end in end_of(problem, place))
    rows = []
    moments = alive_in_backward(orders, problem.chunks)[stage]
    for backward, vector in ((chunk, vector) for chunk, vectors in enumerate(moments) for vector in vectors):
        factors = np.zeros(problem.places * kinds)
        fixed = base + _least_working(problem, places[backward], vector[backward])
        for chunk, place in enumerate(places):
            fixed += vector[chunk] * sum(end.activation_mb for end in end_of(problem, place))
            for kind, layer in enumerate(problem.layers):
                lightest = min(cost.activation_mb for cost in layer.kinds.values())
                factors[place * kinds + kind] = layer.parameter_mb + vector[chunk] * lightest
        rows.append((stage, fixed, factors))
    for needed, starts in zip(fixed_memory(problem, stage, [])[1:], (True, False), strict=True):
        factors = np.zeros(problem.places * kinds)
        by_layer = [layer.parameter_mb + starts * layer.start_mb for layer in problem.layers]
        for place in places:
            factors[place * kinds : (place + 1) * kinds] = by_layer
        rows.append((stage, needed, factors))
    return rows


def _least_working(problem: Problem, place: int, alive: float) -> float:
    """Return the least MB that the first layer of a backward pass needs beyond the lightest activations."""
    first = min(
        cost.transient_mb + alive * (cost.activation_mb - min(kind.activation_mb for kind in layer.kinds.values()))
        for layer in problem.layers
        for cost in layer.kinds.values()
    )
    return max(first, tail_working_memory(problem, place))
