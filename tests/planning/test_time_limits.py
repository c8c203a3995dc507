"""Time limits: however early or late the deadline passes, next to nothing is begun behind it.

The planner's clock is one that stands still until it is looked at for the n-th time, and is beyond every deadline then. What is
begun afterwards is counted, so no test depends on how fast the machine is.
"""

import itertools
import threading
from collections import Counter

import highspy
import numpy as np
import pytest
from planning_problems import random_problem

from mindllm import deadline
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs import process
from mindllm.planning import highs
from mindllm.planning import solve as solver
from mindllm.planning.one_chunk import split_program
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.several_chunks import planner
from mindllm.planning.solve import GRACE, even_split, solve
from mindllm.schedules import simulate, steady

LATE = 1e9


class Clock:
    """Stands still for so many looks, then is late; counts work that is begun late."""

    def __init__(self, looks):
        self.left, self.late = looks, Counter()

    def __call__(self):
        self.left -= 1
        return 0.0 if self.left >= 0 else LATE

    def counting(self, name, function):
        def counted(*arguments, **keywords):
            self.late[name] += self.left < 0
            return function(*arguments, **keywords)

        return counted


@pytest.fixture
def late_after(monkeypatch):
    """Puts a clock in place that is late after so many looks."""

    def put(looks):
        monkeypatch.undo()
        clock = Clock(looks)
        monkeypatch.setattr(deadline, "clock", clock)
        for name, owner, attribute in (
            ("simulation", simulate, "end_times"),
            ("solver", highspy.Highs, "run"),
            ("front", Mixes, "_with_layer"),
            ("choice", StageChoice, "_combined"),
            ("partial plans", split_program, "undominated"),
            ("process", process.subprocess, "Popen"),
        ):
            monkeypatch.setattr(owner, attribute, clock.counting(name, getattr(owner, attribute)))

        def even(*given):  # is simulated in any case
            found = even_split(*given)
            clock.late.clear()
            return found

        monkeypatch.setattr(solver, "even_split", even)
        return clock

    return put


PROBLEMS = {
    "1f1b": random_problem(1, 3, 9, 3, 6, layer_kinds=2),
    "1f1b with delays": random_problem(2, 4, 12, 3, 8, delay=40.0),
    "gpipe": random_problem(3, 3, 9, 3, 6, schedule="gpipe"),
    "chunks": random_problem(7, 2, 14, 3, 6, chunks=2, layer_kinds=2),
    "chunks of one kind": random_problem(1, 2, 9, 1, 4, chunks=2).with_limit(40_000.0),
    "nothing fits": random_problem(1, 3, 9, 3, 6, layer_kinds=2).with_limit(1.0),
}
MOST = {"simulation": 1, "solver": 4}
"""Of what is begun late."""


@pytest.mark.parametrize("name", PROBLEMS)
def test_next_to_nothing_is_begun_behind_the_deadline(name, late_after):
    problem, late = PROBLEMS[name], 0
    for looks in (*range(1, 12), *np.unique(np.geomspace(12, 40_000, 20).astype(int)).tolist()):
        clock = late_after(looks)
        try:
            solution = solve(problem, 5.0)
            assert solution.lower_bound is None or solution.lower_bound <= solution.best.step_time
        except (UserError, CheckFailed) as error:
            assert "fit" in str(error) or "found no plan" in str(error)  # noqa: PT017
        late += clock.left < 0
        assert all(count <= MOST.get(work, 0) for work, count in clock.late.items()), (looks, clock.late)
        if clock.left > 0:  # it was done before
            break
    assert late >= 12


@pytest.mark.parametrize("name", ["1f1b", "chunks"])
def test_more_time_never_gives_a_worse_plan(name, late_after):
    steps = []
    for looks in (1, 40, 400, 4000):
        late_after(looks)
        steps.append(solve(PROBLEMS[name], 5.0).best.step_time)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(steps))


def test_a_plan_that_is_not_steady_does_not_end_the_search(monkeypatch):
    """The even split is steady at once; every other plan needs more micro-batches than are simulated."""
    monkeypatch.setattr(steady, "LONG", 2)
    monkeypatch.setattr(steady, "_few", lambda stages: 2 * stages + 40)
    monkeypatch.setattr(steady, "LARGEST", 2**9)
    problem = random_problem(2, 4, 12, 3, 400, delay=40.0)
    even, tried = even_split(problem), []
    monkeypatch.setattr(steady, "_steady", lambda *given: tried.append(given))
    monkeypatch.setattr(solver, "even_split", lambda *_: even)
    assert solve(problem, 20).best == even
    assert tried
    monkeypatch.setattr(solver, "even_split", lambda *_: None)
    with pytest.raises(steady.NotSteady):
        solve(problem, 20)


def test_a_first_plan_has_a_little_longer(monkeypatch):
    """Where the even split does not fit, the deadline of a first plan is later; never that of anything else."""
    problem = random_problem(7, 2, 14, 3, 6, chunks=2, layer_kinds=2)
    seen = []
    monkeypatch.setattr(planner, "solve_interleaved", None)
    monkeypatch.setattr("mindllm.planning.solve.solve_interleaved", lambda *given: seen.append(given) or (None, 0.0))
    monkeypatch.setattr(deadline, "clock", lambda: 100.0)
    for even in (None, even_split(problem)):
        monkeypatch.setattr("mindllm.planning.solve.even_split", lambda *_, even=even: even)
        try:
            solve(problem, 7.0)
        except UserError:
            assert even is None
    assert [given[2:] for given in seen] == [(107.0, 107.0 + GRACE), (107.0, 107.0)]


def test_a_solver_that_does_not_look_at_the_clock_is_left_to_itself():
    """It goes on until the test ends; one that stops by itself is awaited."""
    end = threading.Event()

    class Deaf:
        limits = ()

        def setOptionValue(self, _, value):  # noqa: N802 - as HiGHS
            self.limits += (value,)

        def getRunTime(self):  # noqa: N802
            return 3.0

        def run(self):
            end.wait()

    deaf = Deaf()
    try:
        with pytest.raises(deadline.OutOfTime):
            highs.run_until(deaf, 0.0, 0.0)
        assert deaf.limits == (3.0,)
    finally:
        end.set()
    highs.run_until(deaf, deadline.now() + 60, deadline.now() + 60)
