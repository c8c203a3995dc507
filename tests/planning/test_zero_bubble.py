"""Zero-bubble schedules and plans: timing of changed orders, memory, and the bound against all plans."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import every_plan, least_of_all_orders, lone_layers, random_problem

from mindllm import deadline
from mindllm.deadline import OutOfTime
from mindllm.planning.plan import Plan, plan_costs, try_plan, zero_bubble_costs
from mindllm.planning.problem import make_problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.solve import solve
from mindllm.planning.zero_bubble import planner
from mindllm.planning.zero_bubble.joint_bound import allowed, joint_bound
from mindllm.planning.zero_bubble.lone_stages import LoneStages
from mindllm.planning.zero_bubble.operation_order import (
    StageCosts,
    fits,
    longest_stage,
    walk,
    whole_step,
    with_micro_batches,
)
from mindllm.planning.zero_bubble.schedule_search import Rule, best_orders, grid
from mindllm.planning.zero_bubble.split_search import SplitSearch, _periodic, near_splits
from mindllm.schedules.operations import BACKWARD, INPUT
from mindllm.schedules.orders import timetable
from mindllm.schedules.simulate import simulate


def costs_of(seed, stages):
    random = np.random.default_rng(seed)
    times = random.uniform(1, 3, (3, stages))
    held = random.uniform(1, 2, stages)
    return StageCosts(*times, held, 0.8 * held, held * random.uniform(1, 2 * stages, stages), random.uniform(0, 0.3))


def kinds_of(orders):
    """As ``walk`` takes them: every backward pass has its gradients of weights apart."""
    return [[BACKWARD if what == INPUT else what for what, _, _ in order] for order in orders]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), stages=st.integers(1, 5), micro_batches=st.integers(1, 9), judge=st.booleans())
def test_the_walk_times_as_the_simulator_and_memory_is_kept(seed, stages, micro_batches, judge):
    costs = costs_of(seed, stages)
    orders = best_orders(costs, micro_batches, 200, whole_step if judge else longest_stage)
    kinds = kinds_of(orders)
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


def equal_stages(stages, room, backward=1.0):
    one = np.ones(stages)
    return StageCosts(one, backward * one, one, one, one, room * one)


@pytest.mark.parametrize(("stages", "room", "bound"), [(8, 6, 201), (16, 12, 211)])
def test_passes_on_beats_need_not_wait_for_each_other(stages, room, bound):
    """Equal stages with memory for three quarters of 1F1B's micro-batches; as soon as possible takes 19% longer."""
    costs = equal_stages(stages, room)
    orders = best_orders(costs, 64, 20_000, whole_step)
    kinds = kinds_of(orders)
    assert all(fits(costs, stage, mine) for stage, mine in enumerate(kinds))
    assert bound <= max(walk(costs, kinds).times(whole_step)) <= 1.05 * bound


@given(
    beat=st.floats(0.5, 2),
    pace=st.floats(0.5, 2),
    room=st.floats(1, 20),
    delay=st.floats(0, 1),
    micro=st.integers(1, 40),
)
def test_starts_are_spread_evenly_over_beats(beat, pace, room, delay, micro):
    costs = replace(equal_stages(5, room, 1.5), delay=delay)
    rule = Rule(np.full(5, micro), np.zeros(5), beat, pace)
    starts = rule.starts(costs, micro)
    length = beat * (2.5 + 2 * delay)
    trip = 5 * 2.5 + 4 * 2 * delay + 1
    apart = max(length, pace * max(3.5, trip / max(1, min(np.floor(room), micro))))
    assert np.allclose(starts / length, np.rint(starts / length), atol=1e-6)
    assert (starts <= apart * np.arange(micro) * (1 + 1e-6)).all()
    assert (starts > apart * np.arange(micro) - length * (1 + 1e-6)).all()
    assert not replace(rule, beat=0.0).starts(costs, micro).any()


def test_rules_with_beats_are_tried_where_memory_is_short():
    beats = [sum(rule.beat > 0 for rule in grid(equal_stages(8, room), 64)) for room in (7, 8)]
    assert beats[0] > 0 == beats[1]
    random = np.random.default_rng(0)
    changed = [Rule(np.full(8, 64), np.zeros(8), 1.0, 1.0).changed(random) for _ in range(50)]
    assert len({(rule.beat, rule.pace) for rule in changed}) > 5
    assert any((rule.wanted != 64).any() for rule in changed)


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


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (3, 2), (3, 3)])
def test_schedules_are_near_the_best_of_all_orders_and_none_is_below_the_bound(stages, micro_batches):
    """Every order on every stage. The bound is close to the best of them, also where memory holds one micro-batch."""
    gaps = []
    for seed in range(3):
        problem = lone_layers(seed, stages, micro_batches, 0.3 * (seed % 2))
        plan = Plan((("none",),) * stages)
        optimum = least_of_all_orders(problem, plan)
        assert try_plan(problem, plan).line.makespan == pytest.approx(optimum, rel=1e-9)
        stages_alone = LoneStages(problem, Mixes(problem), 1)
        assert stages_alone.bound() <= optimum * (1 + 1e-9)
        joint = joint_bound(problem, stages_alone.options, 2 * optimum)
        assert stages_alone.bound() * (1 - 1e-7) <= joint <= optimum * (1 + 1e-9)
        gaps.append(optimum / joint - 1)
    assert np.mean(gaps) < 0.03


def test_the_joint_bound_knows_what_other_stages_recompute():
    """Memory lets no stage keep two layers' activations, so all of a micro-batch's way back is recomputed."""
    kinds = {"none": {"backward": 2, "activation_mb": 10}, "full": {"backward": 3, "activation_mb": 1}}
    layers = [{"name": "body", "count": 4, "forward": 1, "weight_gradient": 1, "kinds": kinds}]
    fields = {"stages": 4, "micro_batches": 4, "schedule": "zb", "layers": layers, "limit_mb": 4}
    problem = make_problem(fields, "short of memory")
    stages = LoneStages(problem, Mixes(problem), 1)
    joint = joint_bound(problem, stages.options, 100.0)
    assert joint == pytest.approx(stages.bound() + 3)  # one more on each of the three stages behind
    assert joint_bound(problem, stages.options, 20.0) == 20.0
    alone = [mine.final[mine.start == stage].tolist() for stage, mine in enumerate(stages.options)]
    assert alone == [[0], [2], [3], [4]]  # of the stages before, and a weight gradient
    assert [mine.final.tolist() for mine in allowed(problem, stages.options, 100.0)] == [[0], [3], [5], [7]]
    assert not any(len(mine.start) for mine in allowed(problem, stages.options, joint * (1 - 1e-6)))
    with pytest.raises(OutOfTime):
        joint_bound(problem, stages.options, 100.0, -1.0)


def test_splits_are_searched_until_the_bound_or_the_deadline(monkeypatch):
    """From a poor split; the clock counts its looks."""
    problem = zero_bubble_problem(3, "zb", 3, 9, 2, 6)
    poor = try_plan(problem, Plan((("full",) * 2, ("full",) * 2, ("full",) * 5)))
    stages = LoneStages(problem, Mixes(problem), 7)
    search = SplitSearch(stages, poor, math.inf)
    search.run(poor.line.makespan)
    assert search.best is poor
    looks = itertools.count()
    monkeypatch.setattr(deadline, "clock", lambda: float(next(looks)))
    search.deadline = 9000.0
    with pytest.raises(OutOfTime):
        search.run(0.0)
    assert search.best.fits
    assert stages.bound() <= search.best.line.makespan <= 0.8 * poor.line.makespan


def test_a_moved_layer_is_tried_with_the_room_that_stages_had_and_with_the_least_recomputation():
    problem = zero_bubble_problem(3, "zb", 3, 9, 2, 6)
    roomy = try_plan(problem, Plan((("full",) * 2, ("full",) * 2, ("full",) * 5)))
    search = SplitSearch(LoneStages(problem, Mixes(problem), 7), roomy, math.inf)
    split = search._found()
    moved = [each.numbers.tolist() for each in search._neighbours(split) if each.counts.tolist() == [2, 3, 4]]
    assert split.numbers.tolist() in moved
    assert any(numbers[2] < split.numbers[2] for numbers in moved)


def test_a_bound_by_crossings_that_does_not_rise_at_once_is_waited_for(monkeypatch):
    class Slow:
        def __init__(self, stages, limit):
            pass

        def rising(self, deadline):
            yield from (3.0, 2.0, 7.0, 10.0, 99.0)

    monkeypatch.setattr(planner, "CrossingBound", Slow)
    assert planner._by_crossings(None, 10.0, 1.0, math.inf) == 10.0


@pytest.mark.parametrize(
    ("period", "room", "way"),
    [(3, 2, 5), (3, 1, math.inf), (4, 2, 4), (4, 1, math.inf), (3.5, 2, 5.5), (2.9, 9, math.inf)],
)
def test_passes_of_a_period_wait_for_a_gap_that_is_long_enough(period, room, way):
    """Two stages of unit times: the last one's backward pass comes back 3 after the first one's forward pass.

    With a period of 3 that is when the next forward pass starts, so it waits for 1; with 3.5 it would run into it; with 4 it ends
    just before, and the weight gradient takes its place between the two.
    """
    fields = {"stages": 2, "micro_batches": 8, "schedule": "zb", "limit_mb": room}
    kinds = {"none": {"backward": 2, "activation_mb": 1}}
    fields["layers"] = [{"name": "body", "count": 2, "forward": 1, "weight_gradient": 1, "kinds": kinds}]
    problem = make_problem(fields, "unit times")
    first, last = allowed(problem, LoneStages(problem, Mixes(problem), 1).options, 1e9)
    onward = _periodic(problem, period)
    behind = onward(last, np.zeros(1))
    assert behind.tolist() == [2 if period >= 3 else math.inf]
    assert onward(first, behind).tolist() == [pytest.approx(way)]


def test_splits_near_the_bound_ask_for_no_more_than_the_best_plan():
    for seed in range(4):
        problem = zero_bubble_problem(seed, "zb", 3, 9, 2, 6)
        stages = LoneStages(problem, Mixes(problem), 7)
        best = 1.3 * stages.bound()
        bound = joint_bound(problem, stages.options, best)
        plans = list(near_splits(stages, bound, best, math.inf))
        assert len(set(plans)) > 2
        assert all(sum(plan.counts) == 9 and len(plan.counts) == 3 for plan in plans)
        steps = [tried.line.makespan for plan in set(plans) if (tried := try_plan(problem, plan))]
        assert len(steps) == len(set(plans))
        assert bound <= min(steps) <= 1.1 * bound
        with pytest.raises(OutOfTime):
            list(near_splits(stages, bound, best, -1.0))


def test_a_search_begins_with_the_best_of_the_splits_that_it_is_given():
    problem = zero_bubble_problem(3, "zb", 3, 9, 2, 6)
    poor = try_plan(problem, Plan((("full",) * 2, ("full",) * 2, ("full",) * 5)))
    stages = LoneStages(problem, Mixes(problem), 7)
    search = SplitSearch(stages, poor, math.inf)
    search.begin([])
    assert search.best is poor
    near = list(near_splits(stages, stages.bound(), poor.line.makespan, math.inf))
    search.begin(near)
    assert search.best.line.makespan < 0.9 * poor.line.makespan
    assert search.best.plan in near


def test_a_plan_without_room_is_read_as_one_of_least_room():
    """As a plan that fits to the last bit may be, where the limit is rounded."""
    problem = zero_bubble_problem(3, "zb", 3, 9, 2, 6)
    poor = try_plan(problem, Plan((("full",) * 2, ("full",) * 2, ("full",) * 5)))
    search = SplitSearch(LoneStages(problem, Mixes(problem), 7), poor, math.inf)
    without = Plan((("none",) * 7, ("full",), ("full",)))
    assert zero_bubble_costs(problem, plan_costs(problem, without)).room[0] < 1
    assert search._split(without).numbers[0] == 0
