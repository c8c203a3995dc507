"""What compiles or simulates a rank stands alone, also inside a rank of a job or a pod of the Ascend operator."""

import os
import subprocess
import sys

from mindllm.jobs.environment import JOB_VARIABLES, without_job
from mindllm.jobs.pool import Task, run_task

PLACE = {"MS_ROLE": "MS_WORKER", "MS_SCHED_PORT": "8118", "RANK_TABLE_FILE": "table.json"}


FORKS = """
import os, sys
from pathlib import Path
from mindllm.jobs.worker import fork, wait_for
from mindllm.jobs.environment import JOB_VARIABLES

def main():
    print([name for name in JOB_VARIABLES if name in os.environ], os.environ["RANK_ID"], flush=True)

assert wait_for(fork(main, Path(sys.argv[1]), {"RANK_ID": "3"}), 60) == 0
assert os.environ["MS_ROLE"] == "MS_WORKER"
"""


def test_a_fork_has_no_place_in_a_job_and_what_it_is_given(tmp_path):
    """In a process without MindSpore's threads, as a server of simulations is."""
    command = [sys.executable, "-c", FORKS, str(tmp_path / "log")]
    subprocess.run(command, env={**os.environ, **PLACE}, check=True)
    assert (tmp_path / "log").read_text() == "[] 3\n"


def test_a_task_is_started_without_one(monkeypatch, tmp_path):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    outcome = run_task(Task("a task", "os:system", ("env",), directory=tmp_path, environment={"RANK_ID": "3"}))
    variables = outcome.log.read_text().splitlines()
    assert "RANK_ID=3" in variables
    assert not {*JOB_VARIABLES} & {variable.partition("=")[0] for variable in variables}


def test_the_rest_of_an_environment_stays():
    assert without_job({**PLACE, "PATH": "/bin", "MS_DEV_SAVE_GRAPHS": "1"}) == {
        "PATH": "/bin",
        "MS_DEV_SAVE_GRAPHS": "1",
    }
