"""msrun on Ascend: the composed command, and the watch over what it starts; here an msrun that starts processes alone."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mindspore.parallel.cluster.run import get_args
from test_launch_job import PRELUDE, ROOT, assert_all_gone, wait_for

from mindllm.launch.msrun import msrun_command

MSRUN = """#!{python}
import os, subprocess, sys
options = dict(word.removeprefix("--").split("=") for word in sys.argv[1:] if word.startswith("--"))
command = [word for word in sys.argv[1:] if not word.startswith("--")]
first = int(options["node_rank"]) * int(options["local_worker_num"])
workers = []
for rank in range(first, first + int(options["local_worker_num"])):
    log = open(options["log_dir"] + f"/worker_{{rank}}.log", "wb")
    environment = {{**os.environ, "RANK_ID": str(rank)}}
    workers.append(subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=environment, start_new_session=True))
sys.exit(max(worker.wait() for worker in workers) != 0)
"""
TRAIN = """
from mindllm.launch.heartbeat import heart
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
heart.start(1)
heart.beat("x", 6)
heart.beat("x", 7 + rank)
print("training", flush=True)
"""


@pytest.fixture(autouse=True)
def fake_msrun(monkeypatch):
    Path("bin").mkdir()
    Path("bin/msrun").write_text(MSRUN.format(python=sys.executable))
    Path("bin/msrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")


def begin(script, *arguments):
    Path("job.py").write_text(PRELUDE + script)
    command = [sys.executable, "-m", "mindllm.launch", "--msrun", "--workers", "4", "--local_workers", "2", *arguments]
    return subprocess.Popen(
        [*command, "--node_rank", "1", "--log_dir", "log", "job.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def finish(process, expect):
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == expect, printed
    assert "Traceback" not in printed
    assert_all_gone()
    return printed


def test_the_composed_command_is_understood_by_the_msrun_of_mindspore(monkeypatch):
    command = msrun_command(["run_llm.py", "--config", "a.yaml"], 16, 8, ("10.0.0.1", 8118), 1, Path("log"), 600)
    assert command[0] == "msrun"
    monkeypatch.setattr(sys, "argv", command)
    found = get_args()
    assert (found.worker_num, found.local_worker_num, found.node_rank) == (16, 8, 1)
    assert (found.master_addr, found.master_port, found.cluster_time_out) == ("10.0.0.1", 8118, 600)
    assert (found.log_dir, found.join) == ("log", True)
    assert [found.task_script, *found.task_script_args] == ["run_llm.py", "--config", "a.yaml"]


def test_ranks_of_this_node_run_and_end():
    finish(begin("print(rank, flush=True)"), 0)
    assert [Path(f"log/worker_{rank}.log").read_text() for rank in (2, 3)] == ["2\n", "3\n"]


def test_a_failure_is_told_with_the_last_steps_and_the_job_started_again():
    patient = TRAIN.replace("start(1)", "start(60)")  # one rank may be long in starting when the other has ended
    printed = finish(begin(patient + "sys.exit(rank == 3)", "--restart", "1"), 1)
    assert printed.count("msrun ended with exit code 1; last step of each rank: 10 (rank 3), 9 (rank 2)") == 2
    assert "restart 1 of 1" in printed


def test_a_rank_that_hangs_is_named_and_nothing_is_left():
    printed = finish(
        begin(TRAIN + "while rank == 2 or not asked:\n    time.sleep(0.1)\n    heart.beat('x') if rank == 3 else 0"), 1
    )
    assert re.search("rank 2 hangs: no sign of life for [12] s", printed)
    assert "File" in Path("log/worker_2.log").read_text()


def test_sigterm_reaches_the_ranks_themselves():
    process = begin(TRAIN + "while not asked:\n    time.sleep(0.05)\n    heart.beat('x')\nprint('saved', flush=True)")
    for rank in (2, 3):
        wait_for(Path(f"log/worker_{rank}.log"), "training")
    process.send_signal(signal.SIGTERM)
    finish(process, 0)
    assert "saved" in Path("log/worker_2.log").read_text()


def test_without_msrun_the_environment_is_asked_for(monkeypatch):
    Path("bin/msrun").unlink()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert "there is no msrun here" in finish(begin(""), 2)
