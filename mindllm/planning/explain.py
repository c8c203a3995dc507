"""Why a plan is not faster: which stage everything waits for, where memory binds, and what one more GB would buy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindllm.planning.solve import Solution, solve
from mindllm.planning.subject import Solver
from mindllm.schedules.orders import alive
from mindllm.schedules.simulate import critical_path
from mindllm.units import GIB, MIB, missing_memory

MORE = GIB / MIB  # MB


@dataclass(frozen=True)
class Explanation:
    """What binds and what more memory would do.

    Attributes:
        critical: share of the step's critical path spent on each stage, ``[stages]``.
        free_mb: memory left on each stage.
        with_more: reported step when every stage has one more GB.
        stage_with_more: for stages where memory binds, the reported step when that stage alone has one more GB.
    """

    critical: np.ndarray
    free_mb: np.ndarray
    with_more: float
    stage_with_more: dict[int, float]


def explain(solution: Solution, seconds: float, solver: Solver = solve) -> Explanation:
    """Solve again with one more GB for all stages, and for each of the three critical stages where memory binds.

    ``solver`` gives plans the step that is reported.
    """
    best = solution.best
    problem, costs = best.problem, best.costs
    visits, _ = critical_path(best.line, problem.point_to_point)
    spent = (visits * costs.times).sum(axis=0).reshape(problem.chunks, problem.stages).sum(axis=0)
    free = np.array(problem.per_stage("limit_mb")) - best.peak_mb
    binding = [int(stage) for stage in np.argsort(-spent) if free[stage] < _lightest_step(solution, int(stage))][:3]
    share = seconds / (1 + len(binding))
    return Explanation(
        spent / (spent.sum() or 1.0),
        free,
        _step(range(problem.stages), share, solution, solver),
        {stage: _step([stage], share, solution, solver) for stage in binding},
    )


def lines(solution: Solution, found: Explanation) -> list[str]:
    """The explanation in sentences."""
    problem, step = solution.best.problem, solution.best.reported_step
    leader = int(found.critical.argmax())
    said = [f"stage {leader} binds: {100 * found.critical[leader]:.0f}% of the longest chain of operations is its own"]
    if not np.isfinite(found.free_mb).any():
        return [*said, "memory has no limit, so more of it buys nothing"]
    tight = [stage for stage in range(problem.stages) if found.free_mb[stage] < _lightest_step(solution, stage)]
    if not tight:
        said.append("memory binds nowhere: every stage could keep more than it does")
    else:
        lacking = {stage: _lightest_step(solution, stage) - found.free_mb[stage] for stage in tight}
        stages = ", ".join(f"{stage} ({missing_memory(lacks, MIB)})" for stage, lacks in lacking.items())
        said.append(f"memory binds where one layer recomputed less does not fit; stage and what it lacks: {stages}")
    said.append(f"one more GB on every stage: {_gain(step, found.with_more)}")
    said += [
        f"one more GB on stage {stage} alone: {_gain(step, more)}" for stage, more in found.stage_with_more.items()
    ]
    return said


def _gain(step: float, more: float) -> str:
    saved = step - more
    return f"step {more:,.6g}, {100 * saved / step:.2f}% less" if saved > 1e-9 * step else "buys nothing"


def _lightest_step(solution: Solution, stage: int) -> float:
    """The least memory by which a stage's activations could grow to save time; infinite where nothing is recomputed."""
    best = solution.best
    problem, steps = best.problem, []
    numbers = problem.layer_numbers(best.plan.counts)
    most = alive(best.line.table.orders, problem.chunks)[stage].max(axis=0)
    for chunk, place in enumerate(range(stage, problem.places, problem.stages)):
        for number, name in zip(numbers[place], best.plan.places[place], strict=True):
            layer = problem.layers[problem.layer_order[number]]
            now = layer.kinds[name]
            steps += [
                float(most[chunk]) * (other.activation_mb - now.activation_mb)
                for other in layer.kinds.values()
                if other.backward < now.backward
            ]
    return min((step for step in steps if step > 0), default=0.0)


def _step(stages: range | list[int], seconds: float, solution: Solution, solver: Solver) -> float:
    """Return the reported step of the best plan with one more GB on these stages."""
    problem = solution.best.problem
    limits = list(problem.per_stage("limit_mb"))
    for stage in stages:
        limits[stage] += MORE
    more = problem.model_copy(update={"limit_mb": tuple(limits)})
    return min(solver(more, seconds).best.reported_step, solution.best.reported_step)
