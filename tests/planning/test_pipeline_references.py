"""Published problems: optima that others proved, bubble rates of 1F1B, cases where a public planner loses to the even split."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from planning_problems import LONGEST, judged

from mindllm.planning.plan import Plan, problem_orders
from mindllm.planning.problem import make_problem
from mindllm.planning.read_problem import Setting, read_problem
from mindllm.planning.solve import solve
from mindllm.schedules.orders import stage_orders, timetable
from mindllm.schedules.simulate import simulate, step_times

DATA = Path(__file__).parents[1] / "ground_truth"
RATES = list(csv.DictReader((DATA / "zero_bubble.csv").read_text().splitlines()))


@pytest.mark.parametrize(
    ("stages", "micro_batches", "limit", "optimum"),
    [
        (16, 16, 53_000, 107_460),
        (16, 32, 53_000, 169_650),
        (16, 128, 53_000, 532_530),
        (16, 64, 50_000, 291_330),
        (8, 32, 60_000, 278_550),
    ],
)
def test_proven_optima_of_a_96_layer_model(stages, micro_batches, limit, optimum):
    setting = Setting(stages=stages, micro_batches=micro_batches, limit_mb=limit)
    solution = solve(read_problem(DATA / "sapp_test_96_layers.json", setting), LONGEST)
    assert solution.best.step_time <= optimum
    assert solution.best.fits
    assert solution.gap <= 1e-6


def test_a_mixture_of_experts_model_of_16_stages_is_planned_optimally():
    solution = solve(read_problem(DATA / "planner_instances.json", instance="pp16-mb64-4k"), LONGEST)
    assert solution.best.step_time == pytest.approx(1132.66, abs=5e-3)
    assert solution.gap <= 1e-6
    assert solution.best.fits


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reference"), [("pp8-vp2-mb240-8k", 5661.55), ("pp4-vp2-mb120-4k", 5868.49)])
def test_interleaved_mixtures_of_experts_are_no_worse_than_their_references(name, reference):
    solution = solve(read_problem(DATA / "planner_instances.json", instance=name), 60)
    assert solution.best.step_time <= reference
    assert solution.best.fits


def uniform(stages, micro_batches, chunks):
    """Two equal layers in each place, a tail as long as one, unlimited memory."""
    layer = {"name": "body", "count": 2 * stages * chunks, "forward": 10}
    fields = {
        "stages": stages,
        "chunks": chunks,
        "micro_batches": micro_batches,
        "layers": [{**layer, "kinds": {"none": {"backward": 20, "activation_mb": 1}}}],
        "head": {"forward": 3, "backward": 6},
        "tail": {"forward": 10, "backward": 20},
    }
    return make_problem(fields, "uniform")


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "even", "modes"),
    [
        (4, 8, 2, 1416, (1456, 1279)),
        (8, 32, 1, 3309, (3309, 3129)),
        pytest.param(8, 32, 2, 5292, (5589, 4929), marks=pytest.mark.slow),
        pytest.param(4, 16, 4, 4536, (4626, 4779), marks=pytest.mark.slow),
    ],
)
def test_cases_where_a_public_planner_loses_to_the_even_split(stages, micro_batches, chunks, even, modes):
    """Both of its modes are matched or beaten."""
    solution = solve(uniform(stages, micro_batches, chunks), 20)
    assert solution.even.step_time == pytest.approx(even)
    assert solution.best.step_time <= min(even - 1, *modes)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks", "better_mode"), [(4, 8, 2, 1279), (8, 32, 1, 3129)])
def test_where_its_better_mode_is_equalled_no_split_is_quicker(stages, micro_batches, chunks, better_mode):
    """Every split is simulated, and the best of them by a judge of its own; recomputation could only add to a pass."""
    problem = uniform(stages, micro_batches, chunks)
    orders = problem_orders(problem)
    counts = np.array(
        [
            np.diff([0, *cuts, problem.layer_count])
            for cuts in itertools.combinations(range(1, problem.layer_count), problem.places - 1)
        ]
    )
    head, tail = np.eye(problem.places)[[0, -1]]
    forward = 10 * counts + 3 * head + 10 * tail
    steps = step_times(timetable(orders, chunks), np.stack([forward.T, 2 * forward.T]))
    best = Plan(tuple(("none",) * count for count in counts[steps.argmin()]))
    assert len(counts) == 6435
    assert steps.min() == judged(problem, best, orders)[0] == better_mode
    solution = solve(problem, 20)
    assert solution.best.step_time == better_mode
    assert solution.lower_bound == pytest.approx(better_mode, rel=1e-6)


@pytest.mark.parametrize("row", RATES, ids=[f"{row['model']} m{row['m']}" for row in RATES])
def test_bubble_rates_of_1f1b_are_those_of_the_paper(row):
    stages, micro = int(row["p"]), int(row["m"])
    forward, backward, weight, delay = (float(row[key]) for key in ("TF", "TB", "TW", "Tcomm"))
    table = timetable(stage_orders("1f1b", stages, 1, micro), 1)
    line = simulate(table, forward * np.ones(stages), (backward + weight) * np.ones(stages), delay=delay)
    longest = max(np.ptp([line.start[table.place == s].min(), line.end[table.place == s].max()]) for s in range(stages))
    assert 1 - micro * (forward + backward + weight) / longest == pytest.approx(float(row["bub_1F1B"]), abs=5.1e-5)
