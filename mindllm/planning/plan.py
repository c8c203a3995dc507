"""A plan of a problem: what each place holds and recomputes, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindllm.planning.problem import End, KindCost, Problem
from mindllm.schedules import steady
from mindllm.schedules.held_memory import held_memory, working_memory, working_memory_of_v
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
    """What a plan costs on every place, ``[places]`` each: times per micro-batch, MB.

    ``weight`` is the time of gradients of weights alone, which are in ``backward``; ``again`` is what they compute again in it.
    ``transient`` is what the backward pass of a micro-batch needs at its fullest moment beyond all that the place keeps of it,
    ``start`` what is needed beyond parameters when a step starts.
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
        """By kind of operation and place, ``[KINDS, places]``."""
        return pass_times(self.forward, self.backward, self.weight, self.again)


def end_of(problem: Problem, place: int) -> list[End]:
    """Head and tail where ``place`` is the first or the last."""
    return [problem.head] * (place == 0) + [problem.tail] * (place == problem.last_place)


def tail_working(problem: Problem, place: int) -> float:
    """Working memory of the tail where ``place`` is the last."""
    return problem.tail.transient_mb if place == problem.last_place else 0.0


def fixed_memory(problem: Problem, stage: int, layers: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """What a stage that holds layers, ``(kind of layer, how many)``, needs beside activations and working memory, in MB.

    The second figure is all that it needs when a step starts, the third all that it needs while weights are updated.
    """
    fixed = sum(problem.layers[kind].parameter_mb * count for kind, count in layers)
    places = range(stage, problem.places, problem.stages)
    fixed += sum(end.memory_mb for place in places for end in end_of(problem, place))
    start = problem.per_stage("start_mb")[stage] + sum(problem.layers[kind].start_mb * count for kind, count in layers)
    in_passes = fixed + sum(problem.per_stage(key)[stage] for key in ("static_mb", "transient_mb"))
    return in_passes, fixed + start, fixed + problem.per_stage("update_mb")[stage]


def room_for(problem: Problem, stage: int, layers: Sequence[tuple[int, int]]) -> float:
    """What activations and working memory may take beside :func:`fixed_memory`; less than any where the rest does not fit."""
    limit = problem.per_stage("limit_mb")[stage]
    fixed, *outside = fixed_memory(problem, stage, layers)
    return limit - fixed if max(outside) <= limit + 1e-9 else -np.inf


def working_of(problem: Problem, costs: Sequence[KindCost], wholes: Sequence[float]) -> float:
    """What the backward pass through layers needs beyond what they keep; ``wholes`` are what they keep at most."""
    if problem.v_shape:
        return working_memory_of_v(
            (cost.activation_mb, cost.transient_mb, whole) for cost, whole in zip(costs, wholes, strict=True)
        )
    return working_memory([(cost.activation_mb, cost.transient_mb) for cost in costs])


def moments_of(problem: Problem, orders: Orders, stage: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The fullest moments of a stage, by chunk: micro-batches that are kept, and those that are held whole, ``[chunks]`` each.

    Working memory comes beside; in a V that of what layers compute again is the micro-batch held whole in its backward pass.
    """
    if not problem.v_shape:
        return [(vector, np.zeros_like(vector)) for vector in alive(orders, problem.chunks)[stage]]
    one = np.eye(problem.chunks, dtype=int)
    return [
        (vector - one[chunk], one[chunk])
        for chunk, vectors in enumerate(alive_in_backward(orders, problem.chunks)[stage])
        for vector in vectors
    ]


def plan_costs(problem: Problem, plan: Plan) -> Costs:
    """Adds up layers, head and tail."""
    rows, order, names = [], problem.layer_order, problem.kind_names
    for place, (numbers, kinds) in enumerate(zip(problem.layer_numbers(plan.counts), plan.places, strict=True)):
        held = [(problem.layers[order[number]], kind) for number, kind in zip(numbers, kinds, strict=True)]
        again = sum(
            float(problem.again[order[number], names.index(kind)]) for number, kind in zip(numbers, kinds, strict=True)
        )
        costs = [layer.kinds[kind] for layer, kind in held]
        wholes = [problem.whole_mb[order[number]] for number in numbers]
        ends = end_of(problem, place)
        rows.append((
            sum(layer.forward for layer, _ in held) + sum(end.forward for end in ends),
            sum(cost.backward for cost in costs) + sum(end.backward for end in ends),
            sum(layer.weight_gradient for layer, _ in held) + sum(end.weight_gradient for end in ends) + again,
            again,
            sum(cost.activation_mb for cost in costs) + sum(end.activation_mb for end in ends),
            sum(layer.parameter_mb for layer, _ in held) + sum(end.memory_mb for end in ends),
            max(working_of(problem, costs, wholes), tail_working(problem, place)),
            sum(layer.start_mb for layer, _ in held),
        ))  # fmt: skip
    return Costs(*np.array(rows, float).T)


@dataclass(frozen=True)
class Evaluation:
    """A plan with its simulated schedule.

    Attributes:
        predicted: the step by the model of ``mindllm time``; None where the plan is not of a run.
    """

    problem: Problem
    plan: Plan
    costs: Costs
    line: Timeline
    predicted: StepTime | None = None

    @property
    def step_time(self) -> float:
        """The objective that solvers minimize and bounds hold for: makespan of the schedule and what nothing hides."""
        return self.line.makespan + self.problem.exposed_communication

    @property
    def reported_step(self) -> float:
        """The step time that is shown: milliseconds by the model of ``mindllm time`` for a run, otherwise the objective."""
        return MILLISECONDS * self.predicted.seconds if self.predicted else self.step_time

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
        """Share of the reported step in which each stage waits, ``[stages]``."""
        if self.predicted:
            busy = self.predicted.line.busy() * self.predicted.workload.strategy.accumulation
            return 1 - busy / self.predicted.seconds
        return 1 - self.line.busy() / self.step_time if self.step_time else np.zeros(self.problem.stages)

    @property
    def passes(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward time of a micro-batch on every place, as the reported step has them, ``[places]`` each."""
        if self.predicted:
            times = self.predicted.times
            return MILLISECONDS * np.array(times.forward), MILLISECONDS * np.array(times.backward)
        return self.costs.forward, self.costs.backward


def peak_memory(problem: Problem, costs: Costs, orders: Orders) -> np.ndarray:
    """Parameters and either static memory and the fullest backward pass, the start of a step or the update, ``[stages]``, MB."""
    shape = (problem.chunks, problem.stages)
    held = held_memory(costs.activation.reshape(shape), costs.transient.reshape(shape), orders)
    fixed = costs.parameter.reshape(shape).sum(axis=0)
    start = costs.start.reshape(shape).sum(axis=0) + np.array(problem.per_stage("start_mb"))
    backward = np.array(problem.per_stage("static_mb")) + np.array(problem.per_stage("transient_mb")) + held
    return fixed + np.maximum.reduce([backward, start, np.array(problem.per_stage("update_mb"))])


def orders_of(problem: Problem) -> Orders:
    """Return the operations of every stage; of a long problem those of the micro-batches that are simulated."""
    if is_long(problem):
        return steady.first_orders(problem.stages, problem.micro_batches)
    return stage_orders(problem.schedule, problem.stages, problem.chunks, problem.micro_batches, problem.pieces)


def is_long(problem: Problem) -> bool:
    """Whether only some of the micro-batches are simulated, because the others repeat the steady state."""
    return problem.settles and steady.is_long(problem.stages, problem.micro_batches)


def evaluate(problem: Problem, plan: Plan, deadline: float = math.inf) -> Evaluation:
    """Simulate a plan.

    Raises:
        OutOfTime: a long pipeline reached no steady state before ``deadline``.
        NotSteady: nor after the most micro-batches that are simulated.
    """
    costs = plan_costs(problem, plan)
    if is_long(problem):
        line = simulate_long(problem.micro_batches, costs.forward, costs.backward, problem.point_to_point, deadline)
    else:
        line = simulate_times(timetable(orders_of(problem), problem.chunks), costs.times, problem.point_to_point)
    return Evaluation(problem, plan, costs, line)


def comparable_steps(one: Evaluation, other: Evaluation) -> tuple[float, float]:
    """Return the reported steps of two plans; their objectives where the step of one of them is not predicted."""
    if (one.predicted is None) != (other.predicted is None):
        return one.step_time, other.step_time
    return one.reported_step, other.reported_step


def quickest(*found: Evaluation | None) -> Evaluation | None:
    """Of those that there are, the first with the shortest step."""
    return min(filter(None, found), key=lambda evaluation: evaluation.step_time, default=None)


def try_plan(problem: Problem, plan: Plan, deadline: float = math.inf) -> Evaluation | None:
    """Return the simulated plan, or None if it does not fit the memory."""
    tried = evaluate(problem, plan, deadline)
    return tried if tried.fits else None


def even_counts(problem: Problem) -> list[tuple[int, ...]]:
    """Even splits, by place: the layers that are left over on the first, or on the last places of the model's order."""
    average, left = divmod(problem.layer_count, problem.places)
    found = []
    for order in (problem.visits, problem.visits[::-1]):
        fuller = set(order[:left])
        found.append(tuple(average + (place in fuller) for place in range(problem.places)))
    return list(dict.fromkeys(found))
