"""Closed forms of steps against the simulator, and the dynamic programme over partial plans against all splits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import LONGEST, random_problem

from mindllm.planning.one_chunk.closed_form import GPipe, OneFOneB, closed_form
from mindllm.planning.one_chunk.planner import longest_stage
from mindllm.planning.one_chunk.split_program import merge, undominated
from mindllm.planning.plan import evaluate, problem_orders
from mindllm.planning.problem import make_problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_table import StageTable, live_micro_batches
from mindllm.planning.several_chunks.planner import all_splits
from mindllm.planning.solve import solve
from mindllm.schedules.orders import stage_orders, timetable
from mindllm.schedules.simulate import step_times
from toolkit.benchmark.pipeline_balance import random_decoder

SIZES = {"stages": st.integers(1, 9), "micro_batches": st.integers(1, 24), "seed": st.integers(0, 10**6)}


def times_and_table(schedule, stages, micro_batches, seed):
    """Times of 20 plans, from nearly equal to very different ones, and the schedule."""
    random = np.random.default_rng(seed)
    times = random.exponential(1, (2, stages, 20)) ** random.choice([0.1, 1, 3], 20)
    return *times, timetable(stage_orders(schedule, stages, 1, micro_batches), 1)


@settings(max_examples=150, deadline=None)
@given(**SIZES)
def test_the_closed_form_of_1f1b_is_the_simulated_step(stages, micro_batches, seed):
    forward, backward, table = times_and_table("1f1b", stages, micro_batches, seed)
    steps = step_times(table, np.stack([forward, backward]))
    np.testing.assert_allclose(closed_form(forward, backward, micro_batches), steps, rtol=1e-11)


@settings(max_examples=50, deadline=None)
@given(delay=st.floats(0, 5), **SIZES)
def test_with_delays_the_closed_form_is_a_lower_bound(stages, micro_batches, seed, delay):
    forward, backward, table = times_and_table("1f1b", stages, micro_batches, seed)
    steps = step_times(table, np.stack([forward, backward]), delay)
    assert (closed_form(forward, backward, micro_batches, delay) <= steps * (1 + 1e-11)).all()


@settings(max_examples=50, deadline=None)
@given(delay=st.floats(0, 5), **SIZES)
def test_the_closed_form_of_gpipe_is_the_simulated_step(stages, micro_batches, seed, delay):
    forward, backward, table = times_and_table("gpipe", stages, micro_batches, seed)
    expected = (forward + backward).sum(axis=0) + 2 * (stages - 1) * delay
    expected += (micro_batches - 1) * (forward.max(axis=0) + backward.max(axis=0))
    np.testing.assert_allclose(step_times(table, np.stack([forward, backward]), delay), expected, rtol=1e-11)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 60), numbers=st.integers(3, 4))
def test_partial_plans_that_are_dropped_are_no_better_than_one_that_is_kept(seed, size, numbers):
    random = np.random.default_rng(seed)
    group, values = random.integers(0, 4, size), random.integers(0, 6, (numbers, size)).astype(float)
    kept = undominated(group, values)
    for index in range(size):
        rivals = kept[group[kept] == group[index]]
        assert (values[:, rivals] <= values[:, [index]]).all(axis=0).any()
    for index in kept:
        rivals = kept[(group[kept] == group[index]) & (kept != index)]
        assert not (values[:, rivals] <= values[:, [index]]).all(axis=0).any()
    leaders, merged = merge(group[kept], values[:, kept], 2)
    assert all((group[kept][leaders] == one).sum() <= 2 for one in range(4))
    for index in kept:
        assert (merged[:, group[kept][leaders] == group[index]] <= values[:, [index]]).all(axis=0).any()


@pytest.mark.parametrize(("kind", "schedule"), [(OneFOneB, "1f1b"), (GPipe, "gpipe")])
@pytest.mark.parametrize("width", [1, 4096])
def test_what_is_decided_is_what_all_splits_say(kind, schedule, width):
    """With one partial plan kept of each, no split is promised to be found, but none below the optimum is claimed missing."""
    random = np.random.default_rng(5)
    for seed in range(25):
        stages, micro_batches = int(random.integers(2, 6)), int(random.integers(1, 14))
        layers = int(random.integers(stages, stages + 7))
        problem = random_problem(
            seed, stages, layers, 3, micro_batches, schedule=schedule, layer_kinds=1 + seed % 2 * (layers > 1)
        )
        held = live_micro_batches(problem_orders(problem))
        table = StageTable(problem, Mixes(problem), held, layers)
        steps = {}
        for counts in all_splits(problem).tolist():
            try:
                steps[tuple(counts)] = evaluate(problem, table.plan(counts)).step_time
            except ValueError:
                continue
        programme = kind(problem, table)
        if not steps:
            assert programme.decide(programme.upper_bound(), width) is None
            continue
        optimum = min(steps.values())
        found = programme.decide(optimum * (1 + 1e-9), width)
        assert found is not None
        if not found.merged:
            assert steps[tuple(found.counts)] == pytest.approx(optimum, rel=1e-8)
            assert programme.decide(optimum * (1 - 1e-7), width) is None


@settings(max_examples=60, deadline=None)
@given(delay=st.floats(0.01, 5), **SIZES)
def test_with_delays_no_step_that_a_split_reaches_is_ruled_out(stages, micro_batches, seed, delay):
    """A layer of its own for each stage, so that there is one split; it must be found for the step that it takes."""
    random = np.random.default_rng(seed)
    times = random.exponential(1, (2, stages)) ** random.choice([0.1, 1, 3])
    layers = [
        {"name": f"{stage}", "count": 1, "forward": first, "kinds": {"none": {"backward": second, "activation_mb": 1}}}
        for stage, (first, second) in enumerate(times.T.tolist())
    ]
    fields = {"stages": stages, "micro_batches": micro_batches, "layers": layers, "point_to_point": delay}
    problem = make_problem(fields, "one split")
    table = StageTable(problem, Mixes(problem), live_micro_batches(problem_orders(problem)), 1)
    step = evaluate(problem, table.plan([1] * stages)).step_time
    assert OneFOneB(problem, table).decide(step * (1 + 1e-9), 64) is not None


@pytest.mark.parametrize("seed", [2, 11])
def test_rounds_with_delays_and_a_last_shorter_one_prove_the_optimum(seed):
    """Of 11, whose 5 further micro-batches are a round over all 4 stages and one over 1, or over 3 and 2."""
    stages, micro_batches = {2: (3, 7), 11: (4, 6)}[seed]
    assert solve(random_problem(seed, stages, 7, 2, micro_batches, delay=400.0), LONGEST).gap <= 1e-6


def test_no_plan_as_quick_as_the_limit_has_a_longer_stage():
    for seed in range(10):
        problem = random_problem(seed, 3, 9, 3, 1 + seed, layer_kinds=1 + seed % 2)
        best = solve(problem, LONGEST).best
        assert max(best.plan.counts) <= longest_stage(problem, best.line.makespan)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("micro_batches", "layer_kinds", "seed"), [(16, 2, 0), (64, 1, 0), (96, 1, 1)])
def test_few_micro_batches_on_64_stages_are_planned_optimally(micro_batches, layer_kinds, seed):
    solution = solve(random_decoder(seed, 64, 200, 8, micro_batches, 1, layer_kinds), LONGEST)
    assert solution.gap <= 1e-6
    assert solution.best.fits


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("stages", [8, 16, 32, 64])
@pytest.mark.parametrize("micro_batches", [2, 8, 16, 32, 64, 96, 128])
def test_many_seeds_of_few_micro_batches_are_planned_optimally(stages, micro_batches):
    for seed in range(200, 204):
        for layer_kinds in (1, 2):
            solution = solve(random_decoder(seed, stages, 200, 8, micro_batches, 1, layer_kinds), LONGEST)
            assert solution.gap <= 1e-6


def test_gpipe_with_two_kinds_of_layers_is_planned_optimally():
    problem = random_decoder(0, 16, 96, 8, 32, 1, 2)
    problem = make_problem({**problem.model_dump(), "schedule": "gpipe", "limit_mb": 2 * problem.limit_mb}, "gpipe")
    assert solve(problem, LONGEST).gap <= 1e-6
