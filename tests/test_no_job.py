"""What compiles or simulates a rank stands alone, also inside a rank of a job or a pod of the Ascend operator."""

import os
import subprocess
import sys

from mindllm.compiled.rank import worker_process
from mindllm.jobs.environment import JOB_VARIABLES, without_job

PLACE = {"MS_ROLE": "MS_WORKER", "MS_SCHED_PORT": "8118", "RANK_TABLE_FILE": "table.json"}


FORKS = """
import os, sys
from pathlib import Path
from mindllm.compiled.simulation.forked import fork, wait_for
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


def test_a_worker_is_started_without_one(monkeypatch, tmp_path):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    given = {}

    def run(command, **options):
        given.update(options["env"])
        (tmp_path / "product").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(worker_process.subprocess, "run", run)
    worker_process.run_worker("module", [], tmp_path, {"RANK_ID": "3"}, product="product", doing="working", timeout=1)
    assert given["RANK_ID"] == "3"
    assert not {*JOB_VARIABLES} & {*given}


def test_the_rest_of_an_environment_stays():
    assert without_job({**PLACE, "PATH": "/bin", "MS_DEV_SAVE_GRAPHS": "1"}) == {
        "PATH": "/bin",
        "MS_DEV_SAVE_GRAPHS": "1",
    }
