"""How a process ends: what it was to tidy up is done once, and a rank skips the exit functions of libraries, which may crash."""

import os
import subprocess
import sys

import pytest

from mindllm.launch.meeting import DESCRIPTOR

PROGRAM = """
import atexit, os
from mindllm.train.leaving import when_leaving
from mindllm.train.ranks import end_rank
atexit.register(os.abort)  # as MindSpore's own function may
when_leaving(print, "first registered")
when_leaving(print, "then")
if {finished}:
    end_rank(3)
atexit.unregister(os.abort)
print("goes on")
"""


def run(finished, environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(finished=finished)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.split("\n")[:-1]


def test_a_rank_tidies_up_and_ends_without_exit_functions():
    assert run(True, {DESCRIPTOR: "0"}) == (3, ["then", "first registered"])


@pytest.mark.parametrize("finished", [True, False])
def test_a_process_without_launcher_ends_as_always(finished):
    assert run(finished, {}) == (0, ["goes on", "then", "first registered"])
