"""Zero-bubble schedules and plans: timing of changed orders, memory, and the bound against all plans."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import every_plan, random_problem

from mindllm.planning.problem import make_problem
from mindllm.planning.schedules.orders import timetable
from mindllm.planning.schedules.simulate import simulate
from mindllm.planning.solve import solve
from mindllm.planning.zero_bubble.operation_order import (
    StageCosts,
    fits,
    longest_stage,
    walk,
    whole_step,
    with_micro_batches,
)
from mindllm.planning.zero_bubble.planner import try_plan
from mindllm.planning.zero_bubble.schedule_search import best_orders


def costs_of(seed, stages):
    random = np.random.default_rng(seed)
    times = random.uniform(1, 3, (3, stages))
    held = random.uniform(1, 2, stages)
    return StageCosts(*times, held, 0.8 * held, held * random.uniform(1, 2 * stages, stages), random.uniform(0, 0.3))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), stages=st.integers(1, 5), micro_batches=st.integers(1, 9), judge=st.booleans())
def test_the_walk_times_as_the_simulator_and_memory_is_kept(seed, stages, micro_batches, judge):
    costs = costs_of(seed, stages)
    orders = best_orders(costs, micro_batches, 200, whole_step if judge else longest_stage)
    kinds = [[what for what, _, _ in order] for order in orders]
    assert with_micro_batches(kinds) == orders
    line = simulate(timetable(orders, 1), costs.forward, costs.backward + costs.weight, costs.weight, costs.delay)
    walked = walk(costs, kinds)
    assert max(walked.times(whole_step)) == pytest.approx(line.makespan, rel=1e-12)
    assert max(walked.times(longest_stage)) == pytest.approx(line.longest_stage(), rel=1e-12)
    for stage, mine in enumerate(kinds):
        assert fits(costs, stage, mine)
        chain = walked.chain(stage)
        times = (costs.forward, costs.backward, costs.weight)
        spent = sum(times[kinds[s][place]][s] for s, place in chain)
        sent = sum(one != other for (one, _), (other, _) in itertools.pairwise(chain))
        assert spent + sent * costs.delay == pytest.approx(walked.ends[stage], rel=1e-12)


def test_orders_that_wait_for_each_other_are_told():
    assert walk(costs_of(0, 2), [[1, 0, 2], [0, 1, 2]]) is None
    assert walk(costs_of(0, 1), [[0, 2, 1]]) is None


def zero_bubble_problem(seed, schedule, stages, layers, kinds, micro_batches, layer_kinds=1, delay=0.0):
    problem = random_problem(seed, stages, layers, kinds, micro_batches, layer_kinds=layer_kinds, delay=delay)
    fields = problem.model_dump() | {"schedule": schedule}
    for layer in fields["layers"]:
        layer["weight_gradient"] = 0.8 * layer["forward"]
    for end in (fields["head"], fields["tail"]):
        end["weight_gradient"] = 0.3 * end["backward"]
    return make_problem(fields, "zero bubble")


@pytest.mark.parametrize(("schedule", "layer_kinds", "delay"), [("zb1p", 1, 0.0), ("zb2p", 2, 0.0), ("zb", 1, 7.0)])
def test_no_plan_is_below_the_bound(schedule, layer_kinds, delay, monkeypatch):
    monkeypatch.setattr("mindllm.planning.plan.ZERO_BUBBLE_EFFORT", 200)
    for seed in range(2):
        problem = zero_bubble_problem(seed, schedule, 2, 4, 2, 3, layer_kinds, delay)
        steps = []
        for plan in every_plan(problem):
            tried = try_plan(problem, plan)
            steps += [tried.step_time] if tried else []
        solution = solve(problem, 5)
        assert solution.best.fits
        assert solution.lower_bound <= min(steps)
        assert solution.best.step_time <= 1.05 * min(steps)
