"""Results that a plan moves to the host although there is room for them: they stay."""

from __future__ import annotations

import contextlib

import numpy as np

from mindllm.planning.plan import Evaluation, Plan, evaluate, peak_memory, plan_costs, quickest
from mindllm.planning.problem import Problem
from mindllm.schedules.steady import NotSteady


def staying(best: Evaluation) -> Evaluation:
    """The plan with all on the device that fits there, from the last layer of each place on.

    A move that copies hide costs nothing that a solver would see, so it may choose one without need.
    """
    problem, instead = best.problem, _instead(best.problem)
    if not instead:
        return best
    limits = np.array(problem.per_stage("limit_mb")) + 1e-6
    places = [list(place) for place in best.plan.places]
    for place in places:
        for number in reversed(range(len(place))):
            if place[number] not in instead:
                continue
            moved, place[number] = place[number], instead[place[number]]
            peaks = peak_memory(problem, plan_costs(problem, _plan(places)), best.line.table.orders)
            if (peaks > limits).any():
                place[number] = moved
    if (plan := _plan(places)) != best.plan:
        with contextlib.suppress(NotSteady):
            return quickest(evaluate(problem, plan), best) or best
    return best


def _plan(places: list[list[str]]) -> Plan:
    return Plan(tuple(map(tuple, places)))


def _instead(problem: Problem) -> dict[str, str]:
    """The kind that recomputes the same and moves nothing, of each kind that moves something."""
    kinds = problem.yaml_kinds or {}
    return {
        name: other
        for name, kind in kinds.items()
        if kind.swap
        for other, same in kinds.items()
        if same == kind.model_copy(update={"swap": 0})
    }
