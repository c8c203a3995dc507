"""Plans of random problems: never worse than the even split, never over the limit, and what they claim is what they take."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import LONGEST, every_plan, judged, random_problem

from mindllm.errors import UserError
from mindllm.planning.plan import Plan, evaluate, problem_orders
from mindllm.planning.problem import make_problem
from mindllm.planning.solve import Infeasible, solve
from mindllm.planning.yaml_plan import read_yaml_plan, write_plan
from mindllm.schedules.operations import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from mindllm.schedules.orders import alive, alive_in_backward, stage_orders, timetable
from mindllm.schedules.simulate import critical_path, end_times, simulate


def shapes(count, seed):
    """Random sizes of problems."""
    random = np.random.default_rng(seed)
    for number in range(count):
        stages = int(random.integers(1, 7))
        yield {
            "seed": seed * 100_000 + number,
            "stages": stages,
            "layers": int(random.integers(max(2, stages), 4 * stages + 3)),
            "kinds": int(random.integers(1, 6)),
            "micro_batches": int(random.integers(1, 14)),
            "layer_kinds": int(random.integers(1, 3)),
            "delay": float(random.choice([0, 0, 7])),
            "working": number % 2 == 0,
        }


def check(problem, seconds):
    """Solves and checks everything that must hold of any solution; None when nothing fits.

    Where others have the machine there may be no plan in that time; then it is given more.
    """
    try:
        solution = solve(problem, seconds)
    except Infeasible:
        return None
    except UserError:
        if seconds > LONGEST:
            raise
        return check(problem, 30 * seconds)
    best = solution.best
    time, peaks = judged(problem, best.plan, problem_orders(problem))
    assert time == pytest.approx(best.step_time, rel=1e-12)
    assert peaks == pytest.approx(best.peak_mb.tolist(), rel=1e-12)
    assert (np.array(peaks) <= np.array(problem.per_stage("limit_mb")) + 1e-6).all()
    assert solution.lower_bound <= best.step_time
    if solution.even is not None:
        assert best.step_time <= solution.even.step_time
    written = write_plan(problem, best.plan)
    assert written is None or read_yaml_plan(problem, written) == best.plan
    return solution


def one_chunk(count, seed):
    gaps = []
    for number, shape in enumerate(shapes(count, seed)):
        schedule = ("1f1b", "1f1b", "gpipe")[number % 3]
        solution = check(random_problem(**shape, schedule=schedule), 0.5 if shape["delay"] else 30)
        if solution is not None:
            gaps.append(solution.gap)
            if not shape["delay"]:
                assert solution.gap <= 1e-6
    assert (
        np.mean(np.array(gaps) <= 1e-6) > 0.7
    )  # those with delays are given half a second, however busy the machine is


def test_one_chunk_plans_hold_what_they_say():
    one_chunk(100, seed=1)


def test_a_plan_whose_longest_chain_turns_before_a_short_last_stage_is_proved():
    """Its chain goes down to the fifth of six stages and has gained micro-batches on the first ones."""
    problem = random_problem(900_154, 6, 23, 5, 3, layer_kinds=2, working=True)
    assert check(problem, 30).gap <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_thousands_of_one_chunk_plans_hold_what_they_say(seed):
    one_chunk(300, seed)


def chunked(count, seed, seconds):
    random = np.random.default_rng(seed)
    for number in range(count):
        stages, chunks = int(random.integers(2, 5)), int(random.integers(2, 4))
        problem = random_problem(
            seed * 1000 + number, stages, int(random.integers(stages * chunks, 3 * stages * chunks)), 3,
            int(random.integers(1, 12)), chunks, ("1f1b", "less_memory")[number % 2], 1 + number % 2,
            working=number % 3 == 0,
        )  # fmt: skip
        check(problem.with_limit(problem.per_stage("limit_mb")[0] * 1.4), seconds)


def test_interleaved_plans_hold_what_they_say():
    chunked(6, 3, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 14))
def test_hundreds_of_interleaved_plans_hold_what_they_say(seed):
    chunked(30, seed, 2.0)


@pytest.mark.parametrize("working", [False, True])
@pytest.mark.parametrize("layer_kinds", [1, 2])
@pytest.mark.parametrize(("stages", "layers", "micro_batches"), [(2, 5, 3), (3, 5, 2), (3, 6, 7), (2, 6, 9)])
def test_small_plans_are_those_of_brute_force(stages, layers, micro_batches, layer_kinds, working):
    for seed in range(4):
        problem = random_problem(seed, stages, layers, 3, micro_batches, layer_kinds=layer_kinds, working=working)
        fitting = (evaluated for plan in every_plan(problem) if (evaluated := evaluate(problem, plan)).fits)
        optimum = min((evaluated.step_time for evaluated in fitting), default=None)
        solution = check(problem, 1.0)
        if optimum is None:
            assert solution is None
        else:
            assert solution.lower_bound <= optimum * (1 + 1e-9)
            assert solution.best.step_time >= optimum * (1 - 1e-9)
            assert solution.gap > 1e-6 or solution.best.step_time == pytest.approx(optimum, rel=1e-6)


def test_interleaved_bounds_are_bounds():
    for seed in range(3):
        problem = random_problem(seed, 2, 5, 2, 4, chunks=2)
        problem = problem.with_limit(problem.per_stage("limit_mb")[0] * 1.5)
        steps = [done.step_time for plan in every_plan(problem) if (done := evaluate(problem, plan)).fits]
        solution = check(problem, 1.5)
        assert solution.lower_bound <= min(steps) * (1 + 1e-9)
        assert solution.best.step_time >= min(steps) * (1 - 1e-9)


def test_every_order_can_be_run_and_runs_everything_once():
    for schedule, stages, chunks, micro in itertools.product(
        ("1f1b", "less_memory", "gpipe"), (1, 2, 3, 5), (1, 2, 3), (1, 2, 5, 7, 11)
    ):
        orders = stage_orders(schedule, stages, chunks, micro)
        table = timetable(orders, chunks)
        assert table.size == 2 * stages * chunks * micro
        assert all(len(set(order)) == len(order) == 2 * chunks * micro for order in orders)


@given(stages=st.integers(1, 9), more=st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_a_v_can_be_run_and_every_stage_holds_as_much(stages, more):
    """Every pass once, whole or in two halves, the second behind the first; no circle; no stage holds more than two per stage."""
    micro = 2 * stages + more
    orders = stage_orders("zero_bubble_v", stages, 2, micro)
    every = {(chunk, number) for chunk in (0, 1) for number in range(micro)}
    for order in orders:
        done = {kind: [one[1:] for one in order if one[0] == kind] for kind in range(KINDS)}
        assert sorted(done[FORWARD]) == sorted(done[BACKWARD] + done[INPUT]) == sorted(every)
        assert sorted(done[INPUT]) == sorted(done[WEIGHT])
        assert all(order.index((INPUT, *one)) < order.index((WEIGHT, *one)) for one in done[WEIGHT])
    one = np.ones(2 * stages)
    line = simulate(timetable(orders, 2), one, 2 * one, one)
    assert line.busy() == pytest.approx(6 * micro)
    assert max(int(held.sum(axis=1).max()) for held in alive(orders, 2)) <= 2 * stages


@pytest.mark.parametrize(("stages", "micro"), [(4, 8), (4, 16), (8, 32)])
def test_a_v_of_equal_passes_waits_less_than_interleaved_chunks(stages, micro):
    """Where forward pass and both halves of a backward pass take as long (Qi et al., 2024, section 4.1)."""
    one = np.ones(2 * stages)
    interleaved = simulate(timetable(stage_orders("1f1b", stages, 2, micro), 2), one, 2 * one)
    line = simulate(timetable(stage_orders("zero_bubble_v", stages, 2, micro), 2), one, 2 * one, one)
    assert line.makespan < interleaved.makespan
    with_more = simulate(timetable(line.table.orders, 2), one, 2 * one, one, again=0.5 * one)
    assert with_more.makespan > line.makespan


def test_uniform_interleaving_has_the_bubble_of_the_formula():
    for stages, chunks, micro in ((4, 1, 8), (4, 2, 8), (8, 4, 16)):
        table = timetable(stage_orders("1f1b", stages, chunks, micro), chunks)
        one = np.ones(stages * chunks)
        assert simulate(table, one, 2 * one).makespan == pytest.approx(3 * (micro * chunks + stages - 1))


def test_one_f_one_b_holds_no_more_than_the_stages_behind():
    orders = stage_orders("1f1b", 6, 1, 4)
    assert [int(held.max()) for held in alive(orders, 1)] == [4, 4, 4, 3, 2, 1]


def test_working_memory_is_needed_when_layers_behind_have_freed_theirs():
    """Both layers need more in their backward pass than they keep; the first one's comes when the second has freed its 100."""
    kinds = {
        "full": {"backward": 3, "activation_mb": 10, "transient_mb": 150},
        "none": {"backward": 2, "activation_mb": 100, "transient_mb": 20},
    }
    body = {"name": "body", "count": 2, "forward": 1, "kinds": kinds}
    problem = make_problem({"stages": 1, "micro_batches": 1, "layers": [body]}, "moments")
    peaks = {names: evaluate(problem, Plan((names,))).peak_mb[0] for names in itertools.product(kinds, repeat=2)}
    assert peaks["none", "none"] == 200 + 20
    assert peaks["full", "none"] == max(110 + 20, 10 + 150)
    assert peaks["full", "full"] == 20 + 150
    loss = problem.model_copy(update={"tail": problem.tail.model_copy(update={"transient_mb": 90})})
    assert evaluate(loss, Plan((("full", "none"),))).peak_mb[0] == 110 + 90


def test_only_the_chunk_in_its_backward_pass_needs_working_memory():
    orders = stage_orders("1f1b", 2, 2, 8)
    first, last = ([vectors.tolist() for vectors in moments] for moments in alive_in_backward(orders, 2))
    assert first == [[[4, 1], [3, 2]], [[4, 1], [3, 2]]]
    assert last == [[[3, 0]], [[2, 1]]]


def test_critical_paths_are_lower_bounds_of_other_plans():
    random = np.random.default_rng(0)
    table = timetable(stage_orders("1f1b", 4, 2, 9), 2)
    times = random.uniform(1, 3, (2, 8, 20))
    steps = end_times(table, times, 0.3).max(axis=0)
    for plan in range(20):
        line = simulate(table, times[0, :, plan], times[1, :, plan], delay=0.3)
        visits, crossings = critical_path(line, 0.3)
        bounds = visits[FORWARD] @ times[0] + visits[BACKWARD] @ times[1] + 0.3 * crossings
        assert line.makespan == pytest.approx(bounds[plan])
        assert (bounds <= steps + 1e-9).all()


def test_a_mix_that_no_list_can_say_is_not_planned():
    """One layer select and one comm would be best, but reads back as both and none."""
    cost = {"none": (10, 100), "select": (11, 40), "comm": (11, 40), "full": (20, 0)}
    kinds = {name: {"backward": time, "activation_mb": memory} for name, (time, memory) in cost.items()}
    body = {"name": "body", "count": 2, "forward": 5, "kinds": kinds}
    problem = make_problem({"stages": 1, "micro_batches": 1, "layers": [body], "limit_mb": 80}, "lists")
    plan = solve(problem, LONGEST).best.plan
    assert set(plan.places[0]) in ({"select"}, {"comm"})
    with pytest.raises(Exception, match="no list can express"):
        write_plan(problem, Plan((("select", "comm"),)))
