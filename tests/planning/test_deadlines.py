"""Deadlines: what is not proved in time is not claimed, and long pipelines are simulated exactly without all micro-batches."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from planning_problems import random_problem
from rich.console import Console

from mindllm.deadline import OutOfTime
from mindllm.errors import UserError
from mindllm.planning.one_chunk.planner import solve_one_chunk
from mindllm.planning.plan import evaluate
from mindllm.planning.problem import make_problem
from mindllm.planning.read_problem import read_problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.reports.plan import answer, solution_parts
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.planning.solve import Solution, even_split, solve, work_bound
from mindllm.schedules import steady
from mindllm.schedules.orders import stage_orders, timetable
from mindllm.schedules.simulate import simulate

INSTANCES = Path(__file__).parents[1] / "ground_truth" / "planner_instances.json"
LAYER = {"name": "body", "count": 32, "forward": 10, "kinds": {"none": {"backward": 20, "activation_mb": 1}}}


@pytest.mark.parametrize("seconds", [0.01, 0.5])
def test_what_is_not_proved_is_not_claimed(seconds):
    """The optimum is near 5,648; in so little time neither it nor a bound near it is found."""
    solution = solve(read_problem(INSTANCES, instance="pp8-vp2-mb240-8k"), seconds)
    assert solution.lower_bound is not None
    assert solution.gap is not None
    assert 0 < solution.lower_bound <= 5648.72 < solution.best.step_time
    assert solution.gap == pytest.approx(solution.best.step_time / solution.lower_bound - 1)


def test_no_bound_is_no_bound():
    even = even_split(random_problem(0, 2, 6))
    unknown = Solution(even, None, 1.0, even)
    assert unknown.gap is None
    found = json.loads(json.dumps(answer(unknown), allow_nan=False))
    assert found["lower_bound"] is None
    assert found["gap"] is None
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*solution_parts(unknown))
    text = console.export_text()
    assert "gap unknown" in text
    assert "0%" not in text.split("gap unknown")[1].splitlines()[0]


def test_the_bound_of_work_alone_is_below_every_plan():
    for seed in range(8):
        problem = random_problem(seed, 3, 9, chunks=1 + seed % 2, delay=0.5 * (seed % 3), layer_kinds=1 + seed % 2)
        even = even_split(problem)
        assert even is None or 0 < work_bound(problem) <= even.line.makespan


def test_free_layers_have_a_step_of_zero_and_no_gap():
    free = {**LAYER, "forward": 0, "kinds": {"none": {"backward": 0, "activation_mb": 1}}}
    for chunks in (1, 2):
        solution = solve(make_problem({"stages": 4, "chunks": chunks, "micro_batches": 8, "layers": [free]}, "free"), 2)
        assert (solution.best.step_time, solution.lower_bound, solution.gap) == (0, 0, 0)
        json.dumps(answer(solution), allow_nan=False)


def test_solvers_stop_at_the_deadline():
    problem = random_problem(1, 4, 16, chunks=2)
    with pytest.raises(OutOfTime):
        lightest_split(problem, -1.0)
    program = PathProgram(problem, timetable(stage_orders("1f1b", 4, 2, 8), 2))
    program.deadline = -1.0
    with pytest.raises(OutOfTime):
        program.solve()


def test_fronts_of_one_chunk_are_not_made_after_the_deadline(monkeypatch):
    problem = random_problem(1, 4, 16)
    with pytest.raises(OutOfTime):
        Mixes(problem, -1.0).front(((0, 4),))
    made = []
    even = even_split(problem)
    monkeypatch.setattr(Mixes, "_with_layer", lambda self, front, *kind: made.append(front) or front)
    assert solve_one_chunk(problem, even, -1.0, -1.0) == (even, 0.0)
    assert even is not None
    assert not made


@pytest.mark.parametrize("delay", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("uniform", [True, False])
def test_the_steady_state_is_repeated_exactly(monkeypatch, delay, uniform):
    monkeypatch.setattr(steady, "LONG", 2)
    monkeypatch.setattr(steady, "_few", lambda stages: 2 * stages + 40)
    random = np.random.default_rng(0)
    for stages, micro in ((1, 300), (2, 401), (5, 333), (8, 700)):
        forward = np.full(stages, 5.0) if uniform else random.uniform(5, 10, stages)
        backward = 2 * forward * (1 if uniform else random.uniform(0.8, 1.3, stages))
        short = steady.simulate_long(micro, forward, backward, delay)
        whole = simulate(timetable(stage_orders("1f1b", stages, 1, micro), 1), forward, backward, delay=delay)
        assert short.repeated > 0
        assert short.makespan == pytest.approx(whole.makespan, rel=1e-9)
        assert short.busy() == pytest.approx(whole.busy(), rel=1e-9)


def test_long_pipelines_are_planned():
    fields = {"stages": 16, "micro_batches": 65_536, "point_to_point": 0.1, "layers": [LAYER]}
    solution = solve(make_problem(fields, "long"), 5)
    assert solution.best.step_time == pytest.approx(65_536 * 60 + 2 * 15 * 30, rel=5e-3)
    assert solution.gap is not None
    assert solution.gap < 0.01
    assert evaluate(solution.best.problem, solution.best.plan).peak_mb.max() == 32


def test_more_than_can_be_simulated_is_refused():
    fields = {"stages": 16, "chunks": 2, "micro_batches": 65_536, "layers": [LAYER]}
    with pytest.raises(UserError, match="stages x chunks x micro_batches is 2,097,152: at most 1,048,576"):
        make_problem(fields, "large")
    with pytest.raises(UserError, match="at most 4,096 are planned"):
        make_problem({"stages": 1, "micro_batches": 1, "layers": [{**LAYER, "count": 5000}]}, "large")
    assert math.isinf(make_problem({**fields, "chunks": 1}, "long").per_stage("limit_mb")[0])
