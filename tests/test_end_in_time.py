"""A process that has failed ends in time: with threads that nobody can join, exit functions that wait, native code in between."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.process.end_in_time import code_of

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import atexit, ctypes, sys, threading, time
from mindllm.process import end_in_time
from mindllm.errors import UserError
end_in_time.NATIVE_SECONDS = 0.5
def stuck_in_here():
    time.sleep(1000)
with end_in_time.ending_in_time(0.5):
    {}
"""
THREAD = "threading.Thread(target=stuck_in_here).start(); "
NATIVE = "atexit.register(ctypes.PyDLL(None).usleep, 10**9); "  # keeps Python's lock
ERROR = "raise ValueError('ours')"


def ended(main):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(main)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("held", [THREAD, "atexit.register(stuck_in_here); "])
def test_after_its_error_a_process_ends_with_its_code_and_says_where_it_was(held):
    done = ended(held + ERROR)
    assert done.returncode == 1
    assert "ValueError: ours" in done.stderr
    assert "ended: this process had failed and was still there" in done.stderr
    assert "stuck_in_here" in done.stderr


def test_native_code_that_keeps_python_from_running_does_not_keep_the_process():
    done = ended(NATIVE + ERROR)
    assert done.returncode == 1
    assert "ValueError: ours" in done.stderr
    assert "Timeout" in done.stderr


def test_the_code_is_that_of_the_error():
    assert ended(THREAD + "raise SystemExit(7)").returncode == 7
    assert [code_of(error("x")) for error in (UserError, RunFailed, CheckFailed, KeyError)] == [2, 1, 3, 1]
    assert [code_of(error) for error in (KeyboardInterrupt(), SystemExit("said"), SystemExit())] == [130, 1, 0]


def test_a_process_that_ends_by_itself_is_left_alone():
    done = ended(ERROR)
    assert (done.returncode, "ended:" in done.stderr) == (1, False)
    done = ended("print('good')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", "")
