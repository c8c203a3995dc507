"""Tasks in forks of a server: how they end, what they report, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mindllm.jobs.pool import Pool, Task, run_task

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


def write_times(path: str, seconds: float, output: str) -> None:
    """A task: how many tasks run at the same time."""
    mark = Path(path, str(os.getpid()))
    mark.touch()
    time.sleep(seconds)
    Path(output).write_text(str(len(list(Path(path).iterdir()))))
    mark.unlink()


def report(count: int) -> None:
    """A task that reports its progress and what it prints."""
    from mindllm.jobs.worker import report_progress

    for done in range(count):
        report_progress("counting", done, None)
        time.sleep(0.05)
    print("counted")


def fail(code: int) -> None:
    """A task that ends with a code, or by a signal."""
    print("a word", file=sys.stderr, flush=True)
    os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)


def end_server() -> None:
    """A task that kills the server it is forked from."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@pytest.fixture
def output(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    return marks, lambda number: tmp_path / f"{number}.txt"


@pytest.mark.parametrize(("slots", "memory", "largest"), [(2, None, 2), (4, 25, 2), (4, 5, 1)])
def test_tasks_run_within_slots_and_memory(output, slots, memory, largest):
    marks, file = output
    with Pool(slots, memory, environment=HERE) as pool:
        for number in range(4):
            task = Task(f"{number}", "test_worker_pool:write_times", (str(marks), 0.5), file(number), memory=10)
            pool.submit(task)
        assert {outcome.code for outcome in pool.outcomes()} == {0}
    assert max(int(file(number).read_text()) for number in range(4)) == largest


def test_a_task_of_all_slots_runs_alone(output):
    marks, file = output
    with Pool(2, environment=HERE) as pool:
        for number, slots in enumerate((1, 1, 2)):
            pool.submit(Task(f"{number}", "test_worker_pool:write_times", (str(marks), 0.5), file(number), slots=slots))
        alone = {outcome.task.name: outcome.alone for outcome in pool.outcomes()}
    assert alone == {"0": False, "1": False, "2": True}
    assert file(2).read_text() == "1"


def test_progress_arrives_with_its_task():
    heard = []
    with Pool(1, environment=HERE, on_progress=lambda task, *words: heard.append((task.name, *words))) as pool:
        pool.submit(Task("a task", "test_worker_pool:report", (3,)))
        (outcome,) = pool.outcomes()
        assert outcome.log.read_text() == "counted\n"
    assert heard == [("a task", "counting", done, None) for done in range(3)]


@pytest.mark.parametrize("code", [0, 3, -signal.SIGSEGV])
def test_a_task_that_fails_leaves_the_others(code):
    with Pool(2, environment=HERE) as pool:
        for task in (Task("bad", "test_worker_pool:fail", (code,)), Task("good", "time:sleep", (1,))):
            pool.submit(task)
        outcomes = {outcome.task.name: outcome for outcome in pool.outcomes()}
        assert (outcomes["bad"].code, outcomes["good"].code) == (code, 0)
        assert outcomes["bad"].log.read_text() == "a word\n"


def test_an_error_of_the_user_is_in_the_log_without_a_traceback(tmp_path):
    outcome = run_task(Task("loading", "mindllm.config:load_config", ("missing.yaml",), directory=tmp_path))
    assert outcome.code == 2
    assert outcome.log.read_text().startswith("error: ")


def test_a_task_that_takes_too_long_is_killed(tmp_path):
    begun = time.monotonic()
    assert run_task(Task("sleeping", "time:sleep", (60,), directory=tmp_path, timeout=0.2)).code is None
    assert time.monotonic() - begun < 30


def test_all_tasks_of_a_server_that_dies_end_and_the_next_one_gets_another_server(tmp_path):
    with Pool(2, environment=HERE) as pool:
        pool.submit(Task("killer", "test_worker_pool:end_server"))
        pool.submit(Task("victim", "time:sleep", (60,)))
        assert [outcome.code for outcome in pool.outcomes()] == [-signal.SIGKILL] * 2
        pool.submit(Task("later", "time:sleep", (0,)))
        assert [outcome.code for outcome in pool.outcomes()] == [0]


def test_a_server_that_does_not_start_fails_its_tasks():
    with Pool(1, preload="no_such_module") as pool:
        pool.submit(Task("a task", "time:sleep", (0,)))
        (outcome,) = pool.outcomes()
        assert outcome.code == 1
        assert "no_such_module" in outcome.log.read_text()


def test_nothing_is_left_of_a_pool_that_an_error_ends():
    pool = Pool(1)
    with suppress(KeyboardInterrupt), pool:
        pool.submit(Task("sleeping", "time:sleep", (60,)))
        pool.poll()
        server = pool._server.process.process.pid
        raise KeyboardInterrupt
    assert not Path(f"/proc/{server}").exists()
    assert not pool.directory.exists()
