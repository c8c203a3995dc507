"""A plan of a problem: what each place holds and recomputes, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from toolkit.pipeline_balance.operation_order import StageCosts, whole_step
from toolkit.pipeline_balance.problem import ZERO_BUBBLE, End, Problem
from toolkit.pipeline_balance.schedule import Orders, alive, stage_orders, timetable
from toolkit.pipeline_balance.simulate import Timeline, simulate
from toolkit.pipeline_balance.zero_bubble import best_orders

ZERO_BUBBLE_EFFORT = 10_000  # operations scheduled beyond the grid, for each plan that is judged


@dataclass(frozen=True)
class Plan:
    """Recompute kinds of the layers of every place, chunk by chunk and inside a chunk stage by stage."""

    places: tuple[tuple[str, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of every place."""
        return tuple(map(len, self.places))


@dataclass(frozen=True)
class Costs:
    """What a plan costs on every place, ``[places]`` each: times per micro-batch, MB."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    activation: np.ndarray
    parameter: np.ndarray
    transient: np.ndarray


def end_of(problem: Problem, place: int) -> list[End]:
    """Head and tail where ``place`` is the first or the last."""
    return [problem.head] * (place == 0) + [problem.tail] * (place == problem.places - 1)


def plan_costs(problem: Problem, plan: Plan) -> Costs:
    """Adds up layers, head and tail."""
    rows = []
    layers = iter(problem.layer_order)
    for place, kinds in enumerate(plan.places):
        held = [(problem.layers[next(layers)], kind) for kind in kinds]
        costs = [layer.kinds[kind] for layer, kind in held]
        ends = end_of(problem, place)
        rows.append((
            sum(layer.forward for layer, _ in held) + sum(end.forward for end in ends),
            sum(cost.backward for cost in costs) + sum(end.backward for end in ends),
            sum(layer.weight_gradient for layer, _ in held) + sum(end.weight_gradient for end in ends),
            sum(cost.activation_mb for cost in costs) + sum(end.activation_mb for end in ends),
            sum(layer.parameter_mb for layer, _ in held) + sum(end.memory_mb for end in ends),
            max(cost.transient_mb for cost in costs),
        ))  # fmt: skip
    return Costs(*np.array(rows, float).T)


@dataclass(frozen=True)
class Evaluation:
    """A plan as the simulator judges it."""

    problem: Problem
    plan: Plan
    costs: Costs
    line: Timeline

    @property
    def step_time(self) -> float:
        """Makespan of the schedule and what nothing hides."""
        return self.line.makespan + self.problem.exposed_communication

    @cached_property
    def peak_mb(self) -> np.ndarray:
        """Peak memory of every stage, ``[stages]``."""
        return peak_memory(self.problem, self.costs, self.line.table.orders)

    @property
    def fits(self) -> bool:
        """Whether no stage is over its limit."""
        return bool((self.peak_mb <= np.array(self.problem.per_stage("limit_mb")) + 1e-6).all())

    @property
    def bubble(self) -> np.ndarray:
        """Share of the step in which each stage waits, ``[stages]``."""
        return 1 - self.line.busy() / self.step_time


def peak_memory(problem: Problem, costs: Costs, orders: Orders) -> np.ndarray:
    """Parameters, static and working memory and the largest activations of the order, ``[stages]``, MB."""
    shape = (problem.chunks, problem.stages)
    activation = costs.activation.reshape(shape)
    held = [
        float((vectors @ activation[:, stage]).max()) for stage, vectors in enumerate(alive(orders, problem.chunks))
    ]
    fixed = costs.parameter.reshape(shape).sum(axis=0) + costs.transient.reshape(shape).max(axis=0)
    return fixed + held + np.array(problem.per_stage("static_mb")) + np.array(problem.per_stage("transient_mb"))


def orders_of(problem: Problem) -> Orders:
    """The operations of every stage of a schedule that does not depend on times; of 1F1B for a zero-bubble schedule."""
    schedule = "1f1b" if problem.schedule in ZERO_BUBBLE else problem.schedule
    return stage_orders(schedule, problem.stages, problem.chunks, problem.micro_batches)


def zero_bubble_orders(problem: Problem, costs: Costs) -> Orders:
    """The zero-bubble schedule of these costs within the memory; activations wait for the weight gradient.

    Raises:
        ValueError: a stage cannot hold one micro-batch.
    """
    fixed = costs.parameter + costs.transient
    fixed = fixed + np.array(problem.per_stage("static_mb")) + np.array(problem.per_stage("transient_mb"))
    room = np.array(problem.per_stage("limit_mb")) - fixed
    if problem.schedule != "zb":
        room = np.minimum(room, {"zb1p": 1, "zb2p": 2}[problem.schedule] * problem.stages * costs.activation)
    stages = StageCosts(
        costs.forward, costs.backward - costs.weight, costs.weight, costs.activation, costs.activation, room,
        problem.point_to_point,
    )  # fmt: skip
    return best_orders(stages, problem.micro_batches, ZERO_BUBBLE_EFFORT, whole_step)


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Simulates a plan."""
    costs = plan_costs(problem, plan)
    split = problem.schedule in ZERO_BUBBLE
    orders = zero_bubble_orders(problem, costs) if split else orders_of(problem)
    weight = costs.weight if split else None
    line = simulate(timetable(orders, problem.chunks), costs.forward, costs.backward, weight, problem.point_to_point)
    return Evaluation(problem, plan, costs, line)


def even_counts(problem: Problem) -> list[tuple[int, ...]]:
    """Even splits: the layers that are left over on the first, or on the last places."""
    average, left = divmod(problem.layer_count, problem.places)
    first: Sequence[int] = [average + (place < left) for place in range(problem.places)]
    return list(dict.fromkeys((tuple(first), tuple(first[::-1]))))
