"""Micro-batches that cross each other: the walk beside every choice of places, the bound beside every order, and its limits."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import least_of_all_orders, lone_layers

from mindllm.deadline import OutOfTime
from mindllm.planning.plan import Plan
from mindllm.planning.problem import make_problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.solve import solve
from mindllm.planning.zero_bubble.crossing_bound import CrossingBound, Trip, crossing_time
from mindllm.planning.zero_bubble.joint_bound import joint_bound
from mindllm.planning.zero_bubble.lone_stages import LoneStages


def trip_of(both, forward, weight, delay=0.0):
    """Stages that take ``both`` for a forward and a backward pass; the first takes ``forward`` of it for the forward pass."""
    turned = np.cumsum(both) + 2 * delay * np.arange(len(both))
    return Trip(forward, both[0] - forward, weight, turned, np.append((turned[-1] - turned - 2 * delay)[:-1], 0.0))


def least_end(trip, under_way, micro_batches):
    """The definition: the least of all choices of places, each timed until nothing changes."""
    pairs = [(i, j) for i in range(micro_batches) for j in range(i + 1, min(i + under_way, micro_batches))]
    stages, whole = len(trip.turned), trip.turned[-1]

    def end(places):
        start, ends, gone = np.zeros((3, micro_batches))
        seen = np.zeros((micro_batches, stages))  # e(j, x)
        before = None
        while before is None or (ends - before).max() > 1e-9:
            if ends[-1] > 3 * micro_batches * whole:  # places that wait for each other
                return math.inf
            before = ends.copy()
            for j in range(micro_batches):
                crossed = {i: places[i, j] for i in range(j) if (i, j) in places}
                free = start[j - 1] + trip.forward if j else 0.0
                room = ends[j - under_way] + trip.weight if j >= under_way else 0.0
                start[j] = max(free, room, *(ends[i] for i, x in crossed.items() if x < 0), 0.0)
                for y in range(stages):
                    held = [gone[i] + trip.beyond[x] for i, x in crossed.items() if 0 <= x < y]
                    seen[j, y] = max(start[j], *held, 0.0)
                gone[j] = seen[j, -1]
                ends[j] = max(ends[j], gone[j] + whole, ends[j - 1] + trip.backward if j else 0.0)
                for i, x in crossed.items():
                    if x >= 0:
                        ends[i] = max(ends[i], seen[j, x] + trip.turned[x])
        return ends[-1] + trip.weight

    choices = itertools.product(range(-1, stages), repeat=len(pairs))
    return min(end(dict(zip(pairs, chosen, strict=True))) for chosen in choices)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6), stages=st.integers(1, 3), under_way=st.integers(2, 3), delay=st.sampled_from((0.0, 0.4))
)
def test_two_places_are_enough_for_each_pair(seed, stages, under_way, delay):
    random = np.random.default_rng(seed)
    trip = trip_of(random.uniform(1, 3, stages), random.uniform(0.2, 0.8), random.uniform(0.1, 2), delay)
    micro_batches = 4 if under_way == 2 else 3
    least = least_end(trip, under_way, micro_batches)
    assert 0.97 * least <= crossing_time(trip, under_way, micro_batches, 10**6) <= least * (1 + 1e-9)
    assert crossing_time(trip, under_way, micro_batches, 2) <= least * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (3, 2), (3, 3)])
def test_no_order_of_operations_is_below_the_bound(stages, micro_batches):
    for seed in range(4):
        problem = lone_layers(seed, stages, micro_batches, 0.3 * (seed % 2))
        optimum = least_of_all_orders(problem, Plan((("none",),) * stages))
        bound = CrossingBound(LoneStages(problem, Mixes(problem), 1), 2 * optimum)
        for stage, mine in enumerate(bound.options):
            for number in {int(each) for each in mine.under_way if each >= 2}:
                assert bound.asked(stage, number, 10**6, math.inf) <= optimum * (1 + 1e-9)
        for limit in (1 + 1e-6, 1.1, 2):
            risen = CrossingBound(LoneStages(problem, Mixes(problem), 1), limit * optimum).rising(math.inf)
            assert all(found <= optimum * (1 + 1e-9) for found in itertools.islice(risen, 4))


def test_micro_batches_cannot_return_to_a_stage_in_time_for_each_other():
    """Four stages behind each other, room for three micro-batches: a place is free again after 4.37, no multiple of 1."""
    trip = trip_of(np.ones(4), 0.36, 0.37)
    alone = 4.37 * 48 / 3
    assert 1.05 * alone < crossing_time(trip, 3, 48, 128) < 1.2 * alone
    assert crossing_time(trip, 1, 5, 8) == pytest.approx(5 * 4.37)
    assert crossing_time(trip, 3, 48, 16) <= crossing_time(trip, 3, 48, 256) * (1 + 1e-9)
    with pytest.raises(OutOfTime):
        crossing_time(trip, 3, 48, 128, -1.0)


def short_of_memory(limit):
    kinds = {"full": {"backward": 3, "activation_mb": 1}}
    layers = [{"name": "body", "count": 8, "forward": 1, "weight_gradient": 0.8, "parameter_mb": 20, "kinds": kinds}]
    fields = {"stages": 4, "micro_batches": 24, "schedule": "zb", "layers": layers, "limit_mb": limit}
    return make_problem({**fields, "head": {"memory_mb": 1}}, "short of memory")


def test_plans_of_little_memory_are_proved_by_crossings():
    """Two layers a stage, and room for the activations of three micro-batches of them."""
    problem = short_of_memory(46.5)
    stages = LoneStages(problem, Mixes(problem), 5)
    solution = solve(problem, 4)
    bound = CrossingBound(stages, solution.best.step_time * 1.01)
    assert bound.promising
    risen = next(bound.rising(math.inf))
    assert joint_bound(problem, stages.options, 1000.0) * 1.01 < risen <= solution.best.step_time
    assert not CrossingBound(stages, 1.0).promising
    assert list(CrossingBound(stages, 1.0).rising(math.inf)) == []
