"""Explain why a plan is not faster: the critical stage, stages limited by memory, and the gain of one more GB."""

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
    """The binding constraints, and the effect of more memory.

    Attributes:
        critical: share of the critical path on each stage, ``[stages]``.
        free_mb: free memory of each stage.
        with_more: reported step if every stage has one more GB.
        stage_with_more: for stages limited by memory, the reported step if only that stage has one more GB.
    """

    critical: np.ndarray
    free_mb: np.ndarray
    with_more: float
    stage_with_more: dict[int, float]


def explain(solution: Solution, seconds: float, solver: Solver = solve) -> Explanation:
    """Solve again with one more GB for all stages, and for each of the three most critical stages limited by memory.

    ``solver`` adds the reported step to plans.
    """
    best = solution.best
    problem, costs = best.problem, best.costs
    visits, _ = critical_path(best.line, problem.point_to_point)
    spent = (visits * costs.times).sum(axis=0).reshape(problem.chunks, problem.stages).sum(axis=0)
    free = np.array(problem.per_stage("limit_mb")) - best.peak_mb
    binding = [int(stage) for stage in np.argsort(-spent) if free[stage] < _least_increase(solution, int(stage))][:3]
    share = seconds / (1 + len(binding))
    return Explanation(
        spent / (spent.sum() or 1.0),
        free,
        _step(range(problem.stages), share, solution, solver),
        {stage: _step([stage], share, solution, solver) for stage in binding},
    )


def lines(solution: Solution, explanation: Explanation) -> list[str]:
    """Return the explanation in sentences."""
    problem, step = solution.best.problem, solution.best.reported_step
    leader = int(explanation.critical.argmax())
    text = [
        f"stage {leader} is critical: it has {100 * explanation.critical[leader]:.0f}% of the longest chain of operations"
    ]
    if not np.isfinite(explanation.free_mb).any():
        return [*text, "memory has no limit, so more memory has no effect"]
    tight = [stage for stage in range(problem.stages) if explanation.free_mb[stage] < _least_increase(solution, stage)]
    if not tight:
        text.append("memory limits no stage: every stage could recompute less")
    else:
        missing = {stage: _least_increase(solution, stage) - explanation.free_mb[stage] for stage in tight}
        stages = ", ".join(f"{stage} ({missing_memory(size, MIB)})" for stage, size in missing.items())
        text.append(
            f"memory limits stages where one layer less recomputed does not fit; stage and missing memory: {stages}"
        )
    text.append(f"one more GB on every stage: {_gain(step, explanation.with_more)}")
    text += [
        f"one more GB on stage {stage} only: {_gain(step, more)}" for stage, more in explanation.stage_with_more.items()
    ]
    return text


def _gain(step: float, more: float) -> str:
    saved = step - more
    return f"step {more:,.6g}, {100 * saved / step:.2f}% less" if saved > 1e-9 * step else "no effect"


def _least_increase(solution: Solution, stage: int) -> float:
    """Return the least increase of a stage's activations that saves time; 0 if nothing is recomputed."""
    best = solution.best
    problem, increases = best.problem, []
    numbers = problem.layer_numbers(best.plan.counts)
    most = alive(best.line.table.orders, problem.chunks)[stage].max(axis=0)
    for chunk, place in enumerate(range(stage, problem.places, problem.stages)):
        for number, name in zip(numbers[place], best.plan.places[place], strict=True):
            layer = problem.layers[problem.layer_order[number]]
            current = layer.kinds[name]
            increases += [
                float(most[chunk]) * (quicker.activation_mb - current.activation_mb)
                for quicker in layer.kinds.values()
                if quicker.backward < current.backward
            ]
    return min((increase for increase in increases if increase > 0), default=0.0)


def _step(stages: range | list[int], seconds: float, solution: Solution, solver: Solver) -> float:
    """Return the reported step of the best plan with one more GB on these stages."""
    problem = solution.best.problem
    limits = list(problem.per_stage("limit_mb"))
    for stage in stages:
        limits[stage] += MORE
    more = problem.model_copy(update={"limit_mb": tuple(limits)})
    return min(solver(more, seconds).best.reported_step, solution.best.reported_step)
