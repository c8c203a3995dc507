"""Plans of sequences in pieces: small ones are the best of all, an independent judge agrees, and what has no pieces is told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import every_plan, judged, random_problem

from mindllm.errors import UserError
from mindllm.planning.exports import torch_schedule
from mindllm.planning.plan import evaluate, problem_orders
from mindllm.planning.problem import Problem, make_problem
from mindllm.planning.solve import Infeasible, solve, work_bound

FORMS = [("seqpipe", 2, 1), ("seqpipe", 3, 2), ("seqvpp", 2, 2), ("seqsmartvpp", 2, 2), ("seqsmartvpp", 1, 3)]


def in_pieces(schedule, pieces, chunks, seed, layers, stages=2, micro_batches=3, kinds=2, **others):
    problem = random_problem(seed, stages, layers, kinds, micro_batches, chunks, schedule, **others)
    return make_problem({**problem.model_dump(), "pieces": pieces, "limit_mb": 1.3 * problem.limit_mb}, "pieces")


@pytest.mark.parametrize("form", FORMS)
def test_small_plans_are_those_of_brute_force(form):
    problem = in_pieces(*form, seed=len(form[0]), layers=2 * form[2] + 2, delay=3.0, working=True)
    optimum = min(done.step_time for plan in every_plan(problem) if (done := evaluate(problem, plan)).fits)
    solution = solve(problem, 20)
    assert solution.best.step_time == pytest.approx(optimum, rel=1.1e-4)
    assert solution.lower_bound <= optimum * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(
    form=st.sampled_from(FORMS), seed=st.integers(0, 10**6), stages=st.integers(2, 4), micro=st.integers(1, 6),
    more=st.integers(0, 4), layer_kinds=st.integers(1, 2), working=st.booleans(),
)  # fmt: skip
def test_plans_hold_what_they_say(form, seed, stages, micro, more, layer_kinds, working):
    layers = stages * form[2] + more
    problem = in_pieces(
        *form, seed, layers, stages, stages * micro, layer_kinds=layer_kinds, delay=5.0, working=working
    )
    try:
        best = (solution := solve(problem, 0.3)).best
    except (Infeasible, UserError):  # or where others have the machine no plan is found in that time
        return
    step, peaks = judged(problem, best.plan, problem_orders(problem))
    assert step == pytest.approx(best.step_time, rel=1e-12)
    assert peaks == pytest.approx(best.peak_mb.tolist(), rel=1e-12)
    assert best.fits
    assert work_bound(problem) * (1 - 1e-12) <= solution.lower_bound <= best.step_time


def test_what_has_no_pieces_is_told():
    fields = random_problem(1, 2, 6, 1, 4).model_dump()
    with pytest.raises(
        UserError, match=r"pieces: 1f1b orders whole sequences \(value 2\); write 1, or schedule seqpipe"
    ):
        make_problem({**fields, "pieces": 2}, "problem")
    with pytest.raises(UserError, match="at most as many pieces as stages, 2"):
        make_problem({**fields, "pieces": 3, "chunks": 2, "schedule": "seqvpp"}, "problem")
    problem = Problem.model_validate({**fields, "pieces": 2, "schedule": "seqpipe", "limit_mb": None})
    with pytest.raises(UserError, match="does not support pieces of sequences"):
        torch_schedule(solve(problem, 1).best)
