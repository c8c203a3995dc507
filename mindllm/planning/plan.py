"""A plan of a problem: what each place holds and recomputes, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindllm.planning.problem import End, Problem
from mindllm.schedules import steady
from mindllm.schedules.held_memory import held_memory, v_working_memory, working_memory
from mindllm.schedules.orders import Orders, alive, alive_in_backward, stage_orders, timetable
from mindllm.schedules.simulate import Timeline, pass_times, simulate_times
from mindllm.schedules.steady import simulate_long
from mindllm.timing.step import StepTime
from mindllm.units import MILLISECONDS


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
    """Costs of a plan on every place, ``[places]`` each: times per micro-batch, MB.

    ``weight`` is the time of weight gradients, a part of ``backward``; ``again`` is the recomputation in them.
    ``transient`` is the memory of the backward pass of a micro-batch at its fullest moment, beyond what the place keeps of it.
    ``start`` is the memory beyond parameters when a step starts.
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    again: np.ndarray
    activation: np.ndarray
    parameter: np.ndarray
    transient: np.ndarray
    start: np.ndarray

    @property
    def times(self) -> np.ndarray:
        """Times by kind of operation and place, ``[KINDS, places]``."""
        return pass_times(self.forward, self.backward, self.weight, self.again)


def end_of(problem: Problem, place: int) -> list[End]:
    """Return the head if ``place`` is the first, and the tail if it is the last."""
    return [problem.head] * (place == 0) + [problem.tail] * (place == problem.last_place)


def tail_working_memory(problem: Problem, place: int) -> float:
    """Return the working memory of the tail if ``place`` is the last, else 0."""
    return problem.tail.transient_mb if place == problem.last_place else 0.0


def fixed_memory(problem: Problem, stage: int, layers: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Return the MB of a stage with ``layers``, ``(layer kind, count)``, without activations and working memory.

    The second figure is its total when a step starts, the third its total while weights are updated.
    """
    fixed = sum(problem.layers[kind].parameter_mb * count for kind, count in layers)
    places = range(stage, problem.places, problem.stages)
    fixed += sum(end.memory_mb for place in places for end in end_of(problem, place))
    start = problem.per_stage("start_mb")[stage] + sum(problem.layers[kind].start_mb * count for kind, count in layers)
    in_passes = fixed + sum(problem.per_stage(key)[stage] for key in ("static_mb", "transient_mb"))
    return in_passes, fixed + start, fixed + problem.per_stage("update_mb")[stage]


def activation_room(problem: Problem, stage: int, layers: Sequence[tuple[int, int]]) -> float:
    """Return the MB left for activations and working memory next to :func:`fixed_memory`; minus infinity if that does not fit."""
    limit = problem.per_stage("limit_mb")[stage]
    fixed, *other_moments = fixed_memory(problem, stage, layers)
    return limit - fixed if max(other_moments) <= limit + 1e-9 else -np.inf


def fullest_moments(problem: Problem, orders: Orders, stage: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the fullest moments of a stage: kept micro-batches, and those with full activations, ``[chunks]`` each.

    Working memory is added to them. In a V the micro-batch in its backward pass has full activations, for recomputation.
    """
    if not problem.v_shape:
        return [(vector, np.zeros_like(vector)) for vector in alive(orders, problem.chunks)[stage]]
    unit = np.eye(problem.chunks, dtype=int)
    return [
        (vector - unit[chunk], unit[chunk])
        for chunk, vectors in enumerate(alive_in_backward(orders, problem.chunks)[stage])
        for vector in vectors
    ]


def plan_costs(problem: Problem, plan: Plan) -> Costs:
    """Return the costs of a plan: the sums over layers, head and tail of every place."""
    rows, order, names = [], problem.layer_order, problem.kind_names
    for place, (numbers, kinds) in enumerate(zip(problem.layer_numbers(plan.counts), plan.places, strict=True)):
        layers = [problem.layers[order[number]] for number in numbers]
        costs = [layer.kinds[kind] for layer, kind in zip(layers, kinds, strict=True)]
        again = sum(
            float(problem.again[order[number], names.index(kind)]) for number, kind in zip(numbers, kinds, strict=True)
        )
        activations = [(cost.activation_mb, cost.transient_mb) for cost in costs]
        if problem.v_shape:
            full = [problem.full_activation_mb[order[number]] for number in numbers]
            working = v_working_memory((*needs, most) for needs, most in zip(activations, full, strict=True))
        else:
            working = working_memory(activations)
        ends = end_of(problem, place)
        rows.append((
            sum(layer.forward for layer in layers) + sum(end.forward for end in ends),
            sum(cost.backward for cost in costs) + sum(end.backward for end in ends),
            sum(layer.weight_gradient for layer in layers) + sum(end.weight_gradient for end in ends) + again,
            again,
            sum(cost.activation_mb for cost in costs) + sum(end.activation_mb for end in ends),
            sum(layer.parameter_mb for layer in layers) + sum(end.memory_mb for end in ends),
            max(working, tail_working_memory(problem, place)),
            sum(layer.start_mb for layer in layers),
        ))  # fmt: skip
    return Costs(*np.array(rows, float).T)


@dataclass(frozen=True)
class Evaluation:
    """A plan with its simulated schedule.

    Attributes:
        predicted: the step by the model of ``mindllm time``; None if the plan is not for a run.
    """

    problem: Problem
    plan: Plan
    costs: Costs
    line: Timeline
    predicted: StepTime | None = None

    @property
    def step_time(self) -> float:
        """Objective of solvers and bounds: makespan of the schedule plus exposed communication."""
        return self.line.makespan + self.problem.exposed_communication

    @property
    def reported_step(self) -> float:
        """Displayed step time: milliseconds by the model of ``mindllm time`` for a run, otherwise the objective."""
        return MILLISECONDS * self.predicted.seconds if self.predicted else self.step_time

    @cached_property
    def peak_mb(self) -> np.ndarray:
        """Peak memory of every stage, ``[stages]``."""
        return peak_memory(self.problem, self.costs, self.line.table.orders)

    @property
    def fits(self) -> bool:
        """Whether every stage is within its limit."""
        return bool((self.peak_mb <= np.array(self.problem.per_stage("limit_mb")) + 1e-6).all())

    @property
    def bubble(self) -> np.ndarray:
        """Share of the reported step in which each stage waits, ``[stages]``."""
        if self.predicted:
            busy = self.predicted.line.busy() * self.predicted.workload.strategy.accumulation
            return 1 - busy / self.predicted.seconds
        return 1 - self.line.busy() / self.step_time if self.step_time else np.zeros(self.problem.stages)

    @property
    def passes(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward time of a micro-batch on every place in the reported step, ``[places]`` each."""
        if self.predicted:
            times = self.predicted.times
            return MILLISECONDS * np.array(times.forward), MILLISECONDS * np.array(times.backward)
        return self.costs.forward, self.costs.backward


def peak_memory(problem: Problem, costs: Costs, orders: Orders) -> np.ndarray:
    """Return the peak memory of every stage, ``[stages]``, MB: in passes, at the start of a step, or in the update."""
    shape = (problem.chunks, problem.stages)
    passes = held_memory(costs.activation.reshape(shape), costs.transient.reshape(shape), orders)
    fixed = costs.parameter.reshape(shape).sum(axis=0)
    start = costs.start.reshape(shape).sum(axis=0) + np.array(problem.per_stage("start_mb"))
    backward = np.array(problem.per_stage("static_mb")) + np.array(problem.per_stage("transient_mb")) + passes
    return fixed + np.maximum.reduce([backward, start, np.array(problem.per_stage("update_mb"))])


def problem_orders(problem: Problem) -> Orders:
    """Return the operations of every stage; of a long problem those of the micro-batches that are simulated."""
    if is_long(problem):
        return steady.first_orders(problem.stages, problem.micro_batches)
    return stage_orders(problem.schedule, problem.stages, problem.chunks, problem.micro_batches, problem.pieces)


def is_long(problem: Problem) -> bool:
    """Return True if only some micro-batches are simulated, because the others repeat the steady state."""
    return problem.settles and steady.is_long(problem.stages, problem.micro_batches)


def evaluate(problem: Problem, plan: Plan, deadline: float = math.inf) -> Evaluation:
    """Simulate a plan.

    Raises:
        OutOfTime: a long pipeline reached no steady state before ``deadline``.
        NotSteady: a long pipeline reached no steady state at all.
    """
    costs = plan_costs(problem, plan)
    if is_long(problem):
        line = simulate_long(problem.micro_batches, costs.forward, costs.backward, problem.point_to_point, deadline)
    else:
        line = simulate_times(timetable(problem_orders(problem), problem.chunks), costs.times, problem.point_to_point)
    return Evaluation(problem, plan, costs, line)


def comparable_steps(first: Evaluation, second: Evaluation) -> tuple[float, float]:
    """Return the reported steps of two plans; their objectives if only one of them has a predicted step."""
    if (first.predicted is None) != (second.predicted is None):
        return first.step_time, second.step_time
    return first.reported_step, second.reported_step


def quickest(*evaluations: Evaluation | None) -> Evaluation | None:
    """Return the first evaluation with the shortest step; None if all are None."""
    return min(filter(None, evaluations), key=lambda evaluation: evaluation.step_time, default=None)


def try_plan(problem: Problem, plan: Plan, deadline: float = math.inf) -> Evaluation | None:
    """Return the simulated plan, or None if it does not fit the memory."""
    evaluation = evaluate(problem, plan, deadline)
    return evaluation if evaluation.fits else None


def even_counts(problem: Problem) -> list[tuple[int, ...]]:
    """Return the even splits, by place: the remaining layers are on the first, or on the last places in model order."""
    average, rest = divmod(problem.layer_count, problem.places)
    splits = []
    for order in (problem.visits, problem.visits[::-1]):
        fuller = set(order[:rest])
        splits.append(tuple(average + (place in fuller) for place in range(problem.places)))
    return list(dict.fromkeys(splits))
