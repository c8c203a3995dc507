"""Interleaved pipelines: small ones are proved against every plan; the parts of the proof are bounds, and stop when told."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import every_plan, random_problem

from mindllm.planning.plan import evaluate, problem_orders
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.several_chunks.bound_process import BoundProcess, build_tree
from mindllm.planning.several_chunks.layer_descent import LayerDescent
from mindllm.planning.several_chunks.layer_tree import PLACES, STAGES, Box, above, below
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.planning.several_chunks.reoptimise import Reoptimiser, StageRounding
from mindllm.planning.solve import solve
from mindllm.planning.yaml_plan import write_plan
from mindllm.schedules.orders import timetable

CASES = [
    (seed, layer_kinds, schedule) for seed in range(3) for layer_kinds, schedule in ((1, "1f1b"), (2, "less_memory"))
]


def small_problem(seed, layer_kinds, schedule, layers=6):
    """Two stages of two chunks; without limits of layers a plan would be trivial, so memory is short."""
    problem = random_problem(seed, 2, layers, 2, 4, 2, schedule, layer_kinds)
    return problem.with_limit(problem.per_stage("limit_mb")[0] * 1.5)


def fitting(problem):
    return [done for plan in every_plan(problem) if (done := evaluate(problem, plan)).fits]


def program_of(problem):
    return PathProgram(problem, timetable(problem_orders(problem), problem.chunks))


def soon():
    return time.monotonic() + 20


@pytest.mark.parametrize(("seed", "layer_kinds", "schedule"), CASES)
def test_small_problems_are_solved_and_proved(seed, layer_kinds, schedule):
    problem = small_problem(seed, layer_kinds, schedule)
    optimum = min(done.step_time for done in fitting(problem))
    solution = solve(problem, 20)
    assert solution.best.step_time == pytest.approx(optimum, rel=1.1e-4)
    assert solution.lower_bound <= optimum * (1 + 1e-9)
    assert solution.gap <= 1.1e-4


@pytest.mark.parametrize(("seed", "layer_kinds", "schedule"), CASES)
def test_the_tree_is_a_bound_from_the_first_report_to_the_last(seed, layer_kinds, schedule):
    problem = small_problem(seed, layer_kinds, schedule)
    optimum = min(done.line.makespan for done in fitting(problem))
    reports = []
    build_tree(problem, optimum, 1e-4, soon()).bound(soon(), reports.append)
    assert reports
    assert max(reports) <= optimum * (1 + 1e-9)
    assert reports[-1] >= optimum * (1 - 1.1e-4)


@pytest.mark.parametrize(("seed", "layer_kinds", "schedule"), CASES)
def test_a_better_plan_than_the_best_is_not_ruled_out(seed, layer_kinds, schedule):
    """The tree is told of a plan that is a little worse than the optimum, as a search may have found it."""
    problem = small_problem(seed, layer_kinds, schedule)
    optimum = min(done.line.makespan for done in fitting(problem))
    for worse in (1 + 5e-5, 1.001, 1.05):
        reports = []
        build_tree(problem, worse * optimum, 1e-4, soon()).bound(soon(), reports.append)
        assert max(reports) <= optimum * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), layers=st.sampled_from((5, 6)), kinds=st.sampled_from((2, 3)))
def test_the_tree_ends_below_the_optimum_and_near_it(seed, layers, kinds):
    """Layers that divide evenly over stages and layers that do not, told of a plan that is a little worse."""
    problem = random_problem(seed, 2, layers, kinds, 4, 2)
    problem = problem.with_limit(problem.per_stage("limit_mb")[0] * 1.5)
    found = fitting(problem)
    if not found:
        return
    optimum = min(done.line.makespan for done in found)
    reports = []
    build_tree(problem, 1.02 * optimum, 1e-4, soon()).bound(soon(), reports.append)
    assert max(reports) <= optimum * (1 + 1e-9)
    assert reports[-1] >= optimum * (1 - 2e-3)


@settings(max_examples=60)
@given(
    low=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    width=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    names=st.sampled_from((PLACES, STAGES)),
    divide=st.sampled_from((above, below)),
    count=st.integers(0, 6),
)
def test_a_divided_box_holds_the_same_numbers_once(low, width, order, names, divide, count):
    low = np.array(low)
    box = Box(low, low + width, np.zeros((4, 1)), low, low + width)
    parts = list(divide(box, names, np.array(order[:3]), count))
    for numbers in np.ndindex(*(np.array(width) + 1)):
        held = [
            ((low + numbers >= getattr(b, names[0])) & (low + numbers <= getattr(b, names[1]))).all() for b in parts
        ]
        assert sum(held) == 1


def test_a_split_is_judged_below_all_of_its_plans():
    problem = small_problem(1, 2, "1f1b")
    descent = LayerDescent(program_of(problem), np.random.default_rng(0))
    least = {}
    for done in fitting(problem):
        least[done.plan.counts] = min(least.get(done.plan.counts, math.inf), done.line.makespan)
    assert len(least) > 3
    for counts, makespan in least.items():
        assert descent.judge(np.array(counts), soon()) <= makespan * (1 + 1e-9)


def test_recomputation_of_a_split_is_the_best_there_is():
    problem = small_problem(0, 1, "1f1b")
    found = fitting(problem)
    for counts in {done.plan.counts for done in found}:
        least = min(done.line.makespan for done in found if done.plan.counts == counts)
        plans = Reoptimiser(program_of(problem), Mixes(problem))
        assert plans.choose_recomputation(np.array(counts), soon())
        assert plans.best_time == pytest.approx(least, rel=1e-3)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), layer_kinds=st.integers(1, 2), working=st.booleans())
def test_rounded_recomputation_of_a_split_fits_and_is_near_the_best(seed, layer_kinds, working):
    problem = random_problem(seed, 2, 6, 3, 4, 2, "1f1b", layer_kinds, working=working)
    problem = problem.with_limit(problem.per_stage("limit_mb")[0] * 1.5)
    least: dict[tuple[int, ...], float] = {}
    for done in fitting(problem):
        least[done.plan.counts] = min(least.get(done.plan.counts, math.inf), done.line.makespan)
    choice = StageChoice(problem, Mixes(problem), problem_orders(problem))
    rounding = StageRounding(program_of(problem), choice, np.random.default_rng(0))
    for counts, makespan in least.items():
        for in_order in (True, False):
            plan = rounding.plan(np.array(counts), in_order, soon())
            assert plan is not None
            done = evaluate(problem, plan)
            assert done.plan.counts == counts
            assert done.fits
            assert makespan * (1 - 1e-9) <= done.line.makespan <= makespan * 1.03


def test_a_split_that_fits_no_memory_is_not_rounded():
    problem = small_problem(0, 1, "1f1b").with_limit(1000)
    choice = StageChoice(problem, Mixes(problem), problem_orders(problem))
    rounding = StageRounding(program_of(problem), choice, np.random.default_rng(0))
    assert rounding.plan(np.array([2, 1, 1, 2]), True, soon()) is None


def test_planning_all_stages_anew_gives_the_best_plan():
    problem = small_problem(2, 1, "1f1b")
    found = fitting(problem)
    plans = Reoptimiser(program_of(problem), Mixes(problem))
    plans.offer(max(found, key=lambda done: done.line.makespan).plan)
    assert plans.replan(np.arange(problem.places), soon())
    assert plans.best_time == pytest.approx(min(done.line.makespan for done in found), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_a_mix_that_no_yaml_says_gives_way_to_one_that_keeps_no_more(seed):
    problem, random = random_problem(seed, 2, 12, 3, 4, 2, "1f1b", 2), np.random.default_rng(seed)
    mixes = Mixes(problem)
    front, worse = mixes.front(((0, 2), (1, 3))), 0
    for _ in range(50):
        first, second = (np.bincount(random.integers(0, 3, count), minlength=3) for count in (2, 3))
        counts = np.array([first, second])
        try:
            written = mixes.written(((0, 2), (1, 3)), counts)
            order = {name: rank for chain in mixes._chains for rank, name in enumerate(chain)}
            assert [order[name] for name in written] == sorted(order[name] for name in written)
        except ValueError:
            worse += 1
            found = mixes.instead(((0, 2), (1, 3)), counts)
            costs = [[layer.kinds[name].activation_mb for name in problem.kind_names] for layer in problem.layers]
            if found is None:
                assert (counts * costs).sum() < front.activation.min()
            else:
                assert (found * costs).sum() <= (counts * costs).sum() * (1 + 1e-9)
                assert len(mixes.written(((0, 2), (1, 3)), found)) == 5
    assert worse


def test_plans_of_layers_of_two_kinds_can_be_written():
    """Of the second kind alone recomputation is cheap, so an answer that minds no order recomputes it behind the first."""
    problem = random_problem(12007, 3, 9, 3, 11, 2, "less_memory", 2)
    problem = problem.with_limit(problem.per_stage("limit_mb")[0] * 1.4)
    plans = Reoptimiser(program_of(problem), Mixes(problem))
    for counts in itertools.product((1, 2, 3), repeat=5):
        if 9 - sum(counts) in (1, 2, 3):
            plans.best = None
            plans.choose_recomputation(np.array([*counts, 9 - sum(counts)]), soon())
            assert plans.best is None or write_plan(problem, plans.best.plan) is not None


def test_a_plan_over_the_memory_is_not_taken():
    problem = small_problem(0, 1, "1f1b")
    problem = problem.with_limit(0.8 * problem.per_stage("limit_mb")[0])
    over = next(plan for plan in every_plan(problem) if not evaluate(problem, plan).fits)
    plans = Reoptimiser(program_of(problem), Mixes(problem))
    assert not plans.offer(over)
    assert plans.best is None


def test_paths_that_are_forgotten_were_not_needed_and_come_back():
    problem = random_problem(3, 4, 16, 3, 8, 2)
    program = program_of(problem)
    bound, _ = program.find_paths(soon())
    known = len(program.known)
    program.forget_slack_paths(known // 2)
    assert len(program.known) == known // 2
    weaker, _ = program.solve()
    assert weaker <= bound * (1 + 1e-9)
    again, _ = program.find_paths(soon())
    assert again == pytest.approx(bound, rel=2e-3)


def test_the_process_raises_the_bound_and_ends_with_its_context():
    problem = random_problem(5, 4, 20, 3, 8, 2)
    best = solve(problem, 2).best.line.makespan
    with BoundProcess(problem, best, 1e-4, 60) as process:
        limit = time.monotonic() + 60
        while not process.bound and time.monotonic() < limit:
            time.sleep(0.05)
        assert process.running
    assert 0.5 * best < process.bound
    assert not process.running
