"""Plans of a V within a memory limit: an independent judge, bounds below every plan, brute force, what cannot be asked for."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import every_plan, hold_a_plan_to_what_it_says, random_problem

from mindllm.cli.plan import main
from mindllm.errors import UserError
from mindllm.planning.exports import megatron_options, torch_schedule
from mindllm.planning.plan import evaluate, folded_costs, orders_of, peak_memory, plan_costs
from mindllm.planning.problem import make_problem
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.solve import solve
from mindllm.planning.zero_bubble.folded_bound import folded_bound
from mindllm.planning.zero_bubble.folded_orders import check_room
from mindllm.planning.zero_bubble.folded_split_bound import folded_split_bound


def controllable(seed, layers=6, stages=2, micro_batches=3, kinds=2, share=1.0, **others):
    problem = random_problem(seed, stages, layers, kinds, micro_batches, 2, "controllable_v", **others)
    return problem.with_limit(problem.per_stage("limit_mb")[0] * share)


def fitting(problem):
    """Plans in which every stage can start a step and has room for a micro-batch, with their costs."""
    for plan in every_plan(problem):
        costs = plan_costs(problem, plan)
        if (peak_memory(problem, costs, orders_of(problem)) > problem.limit_mb).any():
            continue
        try:
            check_room(found := folded_costs(problem, costs))
        except ValueError:
            continue
        yield plan, found


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6), layer_kinds=st.integers(1, 2), delay=st.sampled_from((0.0, 5.0)),
    kinds=st.integers(1, 3), working=st.booleans(), micro=st.integers(1, 9), share=st.sampled_from((0.7, 1.0, 1.5)),
)  # fmt: skip
def test_the_bound_of_all_splits_is_below_that_of_every_plan(seed, layer_kinds, delay, kinds, working, micro, share):
    problem = controllable(seed, 6, 2, micro, kinds, share, layer_kinds=layer_kinds, delay=delay, working=working)
    least = min((folded_bound(costs, micro) for _, costs in fitting(problem)), default=math.inf)
    bound = folded_split_bound(problem, Mixes(problem), math.inf)
    assert bound <= least * (1 + 1e-9)
    if (
        kinds == 1 and not working and math.isfinite(least)
    ):  # then all that it leaves out are gradients of the first layers
        assert bound >= 0.9 * least


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6), stages=st.integers(1, 3), micro=st.integers(1, 6), layers=st.integers(0, 5),
    layer_kinds=st.integers(1, 2), delay=st.sampled_from((0.0, 7.0)), working=st.booleans(),
)  # fmt: skip
def test_plans_hold_what_they_say(seed, stages, micro, layers, layer_kinds, delay, working):
    layer_kinds = min(layer_kinds, 2 * stages + layers - 1)
    problem = controllable(
        seed, 2 * stages + layers, stages, micro, layer_kinds=layer_kinds, delay=delay, working=working
    )
    hold_a_plan_to_what_it_says(problem, 0.3, lambda best: best.line.table.orders, 1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_small_plans_are_as_short_as_the_best_of_all(seed):
    """Each plan of brute force that its bound does not rule out has the order that a plan gets when it is judged."""
    problem = controllable(seed, 5, 2, 4, layer_kinds=1 + seed % 2, delay=float(seed))
    bounds = {plan: folded_bound(costs, 4) for plan, costs in fitting(problem)}
    optimum = math.inf
    for plan in sorted(bounds, key=bounds.__getitem__):
        if bounds[plan] < optimum:
            optimum = min(optimum, evaluate(problem, plan).step_time)
    solution = solve(problem, 2)
    assert solution.best.step_time <= optimum * (1 + 1e-3)
    assert solution.lower_bound <= optimum


def file_of(tmp_path, **changes):
    layer = {"name": "a", "count": 16, "forward": 1, "weight_gradient": 1, "parameter_mb": 1}
    layers = [
        {**layer, "kinds": {"none": {"backward": 2, "activation_mb": 10}, "full": {"backward": 3, "activation_mb": 1}}}
    ]
    fields = {"stages": 4, "chunks": 2, "micro_batches": 8, "layers": layers, "limit_mb": 1000, **changes}
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(fields))
    return str(path)


def planned(capsys, *options):
    assert main([*options, "--json", "--seconds", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_limit_decides_the_order_that_a_command_line_gets(tmp_path, capsys):
    """V-min keeps a half of ZB-V's activations of 4 stages and takes longer; MindSpore's V takes longer than ZB-V."""
    wide, order = file_of(tmp_path), tmp_path / "order.csv"
    roomy = planned(capsys, "--problem", wide, "--schedule", "controllable_v", "--torch_csv", str(order))
    passes = [[action.strip("0123456789") for action in row.split(",")] for row in order.read_text().split()]
    assert all(sorted(row) == sorted("FIW" * 16) for row in passes)
    tight = file_of(tmp_path, limit_mb=85, schedule="controllable_v")  # four passes of two layers, and parameters
    small = planned(capsys, "--problem", tight, "--explain", "--picture", str(tmp_path / "order.html"))
    theirs = planned(capsys, "--problem", file_of(tmp_path, schedule="zero_bubble_v"))
    assert roomy["lower_bound"] <= roomy["step_time"] < theirs["step_time"]
    assert roomy["step_time"] < small["step_time"]
    assert max(small["peak_memory_mb"]) <= 85 < max(roomy["peak_memory_mb"])
    assert "controllable_v" in (tmp_path / "order.html").read_text()


def test_what_it_is_not_written_to_is_told(tmp_path, capsys):
    problem = file_of(tmp_path, schedule="controllable_v")
    with pytest.raises(UserError, match="MindSpore trains a V in its own order alone"):
        main(["--problem", problem, "--apply", "run.yaml", "--output", str(tmp_path / "planned.yaml")])
    with pytest.raises(UserError, match="write chunks 2, or --interleave 2"):
        main(["--problem", file_of(tmp_path, schedule="controllable_v", chunks=1)])
    layer = {"name": "a", "count": 4, "forward": 1, "weight_gradient": 1}
    layers = [{**layer, "kinds": {"none": {"backward": 2, "activation_mb": 1}}}]
    fields = {"stages": 2, "chunks": 2, "micro_batches": 1, "schedule": "controllable_v", "layers": layers}
    best = solve(make_problem(fields, "v"), 1).best
    assert torch_schedule(best).count("F0") == 4
    with pytest.raises(UserError, match="no V"):
        megatron_options(best)
