"""Plans of MindSpore's zero_bubble_v: small ones are the best of all, bounds are bounds, what is written reads back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import every_plan, hold_a_plan_to_what_it_says, random_problem

from mindllm.errors import UserError
from mindllm.planning.plan import Plan, evaluate, problem_orders
from mindllm.planning.problem import make_problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.planning.solve import solve
from mindllm.planning.yaml_plan import write_plan
from mindllm.schedules.orders import timetable


def folded(seed, layers=6, stages=2, micro_batches=4, kinds=2, **others):
    problem = random_problem(seed, stages, layers, kinds, micro_batches, 2, "zero_bubble_v", **others)
    return problem.with_limit(problem.per_stage("limit_mb")[0] * 1.5)


def fitting(problem):
    return [done for plan in every_plan(problem) if (done := evaluate(problem, plan)).fits]


CASES = [(seed, 1 + seed % 2, float(seed % 3), seed % 2 == 1) for seed in range(5)]


@pytest.mark.parametrize(("seed", "layer_kinds", "delay", "working"), CASES)
def test_small_plans_are_those_of_brute_force(seed, layer_kinds, delay, working):
    problem = folded(seed, layer_kinds=layer_kinds, delay=delay, working=working)
    optimum = min(done.step_time for done in fitting(problem))
    solution = solve(problem, 20)
    assert solution.best.step_time == pytest.approx(optimum, rel=1.1e-4)
    assert solution.lower_bound <= optimum * (1 + 1e-9)
    assert solution.gap <= 1.1e-4


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    stages=st.integers(2, 4),
    more=st.integers(0, 5),
    layers=st.integers(0, 6),
    layer_kinds=st.integers(1, 2),
    delay=st.sampled_from((0.0, 7.0)),
    working=st.booleans(),
)
def test_plans_hold_what_they_say(seed, stages, more, layers, layer_kinds, delay, working):
    problem = folded(
        seed, 2 * stages + layers, stages, 2 * stages + more, layer_kinds=layer_kinds, delay=delay, working=working
    )
    hold_a_plan_to_what_it_says(problem, 0.4, lambda best: problem_orders(problem))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), layer_kinds=st.integers(1, 2), delay=st.sampled_from((0.0, 5.0)))
def test_the_program_over_paths_is_below_every_plan(seed, layer_kinds, delay):
    """Also in plans whose recomputation is not the one with the least time of its stage."""
    problem = folded(seed, layer_kinds=layer_kinds, delay=delay)
    program = PathProgram(problem, timetable(problem_orders(problem), 2))
    bound, _ = program.find_paths(float("inf"))
    steps = [done.line.makespan for done in fitting(problem)]
    assert not steps or bound <= min(steps) * (1 + 1e-9)


def test_times_that_a_search_is_told_are_those_of_its_plans():
    problem = folded(3, 9, 3, 7, layer_kinds=2, delay=3.0)
    choice = StageChoice(problem, Mixes(problem), problem_orders(problem))
    splits = np.array([[2, 1, 2, 1, 2, 1], [1, 1, 1, 2, 2, 2]])
    times = choice.times(splits)
    for number, split in enumerate(splits):
        assert evaluate(problem, choice.plan(split)).costs.times == pytest.approx(times[..., number])


def test_layers_of_the_second_chunk_run_back_and_the_head_is_on_the_first_stage():
    layer = {"forward": 1, "weight_gradient": 1, "kinds": {"none": {"backward": 2, "activation_mb": 1}}}
    layers = [{**layer, "name": name, "count": 3, "parameter_mb": size} for name, size in (("a", 1), ("b", 10))]
    fields = {"stages": 2, "chunks": 2, "micro_batches": 4, "schedule": "zero_bubble_v", "layers": layers}
    ends = {"head": {"memory_mb": 100}, "tail": {"forward": 5, "memory_mb": 1000}}
    problem = make_problem({**fields, **ends}, "v")
    plan = Plan((("none",), ("none", "none"), ("none", "none"), ("none",)))  # chunk 0 on stages 0, 1, then chunk 1
    costs = evaluate(problem, plan).costs
    assert costs.parameter.tolist() == [101, 2, 1020, 10]
    assert costs.forward.tolist() == [1, 2, 7, 1]
    assert write_plan(problem, plan).offset == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("changes", "weight", "said"),
    [
        ({"chunks": 1}, 1, "has 2 chunks per stage, not 1"),
        ({"micro_batches": 3}, 1, "two micro-batches per stage at least"),
        ({}, 0, "no layer has a weight_gradient"),
    ],
)
def test_what_no_v_is_planned_of_is_told(changes, weight, said):
    layer = {"name": "a", "count": 4, "forward": 1, "weight_gradient": weight}
    layers = [{**layer, "kinds": {"none": {"backward": 2, "activation_mb": 1}}}]
    fields = {"stages": 2, "chunks": 2, "micro_batches": 4, "schedule": "zero_bubble_v", "layers": layers}
    with pytest.raises(UserError, match=said):
        make_problem({**fields, **changes}, "v")
