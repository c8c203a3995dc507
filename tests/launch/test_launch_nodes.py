"""A job on several nodes, here two launchers on one machine: one job to the ranks, ended, stopped and started again as one."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch_job import AGREE_TO_STOP, PRELUDE, ROOT, assert_all_gone, wait_for

from mindllm.cli.launch import shared_directory


def begin(script, port, node, arguments=(), local=2, workers=4, command="job.py"):
    """Starts the launcher of a node, as the script for several nodes would."""
    Path("job.py").write_text(PRELUDE + script)
    words = [sys.executable, "-m", "mindllm.launch", "--workers", str(workers), "--local_workers", str(local)]
    words += ["--master_addr", "127.0.0.1", "--port", str(port), "--node_rank", str(node), "--log_dir", f"log_{node}"]
    words += ["--shared_dir", "shared"]
    return subprocess.Popen(
        [*words, "--timeout", "60", *arguments, command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def finish(launchers, expect):
    """What each printed; none of their ranks may be left."""
    printed = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == expect, printed
    assert not any("Traceback" in text for text in printed), printed
    assert_all_gone()
    return printed


def wait_for_all(launchers, text):
    """Until all ranks have written ``text``."""
    for rank in range(4):
        wait_for(Path(f"log_{rank // 2}/worker_{rank}.log"), text, launchers)


def test_ranks_of_both_nodes_meet_and_each_knows_its_place(port):
    names = ("RANK_ID", "DEVICE_ID", "MS_SCHED_HOST", "MS_WORKER_NUM")
    script = f"print(seat.sum([rank + 1.0]), *(os.environ[name] for name in {names}))"
    other = begin(script, port, 1)
    time.sleep(0.3)  # the order in which nodes are started does not matter
    first, _ = finish([begin(script, port, 0), other], [0, 0])
    assert first == "[10.0] 0 0 127.0.0.1 4\n"
    assert Path("log_1/worker_3.log").read_text() == "[10.0] 3 1 127.0.0.1 4\n"


def test_a_rank_that_dies_on_another_node_is_named_with_its_end(port):
    script = "seat.sum([1.0])\nif rank == 3:\n    sys.exit('error: no such corpus')\nseat.sum([1.0])"
    first, other = finish([begin(script, port, node) for node in range(2)], [1, 1])
    assert re.search(r"rank 3 on \S+ ended with exit code 1; the job was ended", first)
    assert "error: no such corpus" in first
    assert "the job has failed; the output of node 0 says why" in other


def test_a_rank_that_hangs_on_another_node_is_named(port):
    script = """
from mindllm.launch.heartbeat import heart
heart.start(1)
for step in range(1, 3):
    heart.beat("x", step)
if rank == 2:
    time.sleep(1000)
seat.sum([1.0])
"""
    first, _ = finish([begin(script, port, node) for node in range(2)], [1, 1])
    assert "rank 2 hangs: no sign of life for" in first
    assert "last step of each rank: 2 (ranks 0-3)" in first


def test_a_node_that_is_lost_ends_the_job(port):
    script = "print('up', flush=True)\nseat.sum([1.0])\ntime.sleep(1000)"
    launchers = [begin(script, port, node) for node in range(2)]
    wait_for_all(launchers, "up")
    launchers[1].kill()
    first, _ = finish(launchers, [1, -9])
    assert "was lost with its node" in first


def test_ranks_end_with_the_first_node(port):
    script = "print('up', flush=True)\nseat.sum([1.0])\ntime.sleep(1000)"
    launchers = [begin(script, port, node) for node in range(2)]
    wait_for_all(launchers, "up")
    launchers[0].kill()
    _, other = finish(launchers, [-9, 1])
    assert "the launcher of node 0 is gone" in other


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_either_node_stops_all_ranks_in_their_own_way(port, asked):
    launchers = [begin(AGREE_TO_STOP, port, node) for node in range(2)]
    wait_for_all(launchers, "training")
    launchers[asked].send_signal(signal.SIGTERM)
    finish(launchers, [0, 0])
    assert "saved" in Path("log_1/worker_3.log").read_text()


FAIL_ONCE = """
attempts = len([name for name in os.listdir(".") if name.startswith(f"start_{rank}")])
open(f"start_{rank}_{attempts}_{os.environ['MINDLLM_JOB']}", "w").close()
seat.sum([1.0])
if rank == 3 and not attempts:
    sys.exit(1)
seat.sum([1.0])
print("done", flush=True)
"""


def test_the_job_is_started_again_on_all_nodes(port):
    launchers = [begin(FAIL_ONCE, port, node, ["--restart", "2"] if not node else []) for node in range(2)]
    first, _ = finish(launchers, [0, 0])
    assert "restart 1 of 2: going on from the last good checkpoint" in first
    names = [path.name.split("_") for path in Path().glob("start_*")]
    assert len(names) == 8
    assert len({name[-1] for name in names}) == 1


def test_the_directory_that_nodes_share_is_the_run_s_own_and_that_of_the_logs_for_another_program():
    config = ROOT / "configs/llama2/pretrain_llama2_tiny.yaml"
    run = [str(ROOT / "run_llm.py"), "--config", str(config), "--batch_size", "2"]
    assert shared_directory([*run, "--output_dir", "/shared/run"], Path("log")) == Path("/shared/run")
    assert shared_directory(run, Path("log")) == Path("output/llama2_tiny")
    assert shared_directory(["job.py", "--output_dir", "x"], Path("log")) == Path("log")


def test_a_node_that_never_joins_is_named(port):
    launcher = begin("", port, 0, ["--timeout", "1"])
    (printed,) = finish([launcher], [1])
    assert "node 1 did not join at 127.0.0.1 within 1 s; start the same command there with its NODE_RANK" in printed


def test_ctrl_c_before_node_0_has_come_ends_as_interrupted(port):
    Path("shared").mkdir()
    (Path("shared") / f".launch-secret-{port}").write_text("of an earlier job")
    with socket.create_server(("127.0.0.1", port + 1)):  # somebody else answers, of which it says that it waits
        launcher = begin("", port, 1)
        lines = [launcher.stdout.readline()]
        launcher.send_signal(signal.SIGINT)
        printed = finish([launcher], [130])
    assert "waiting" in lines[0]
    assert "stopped before the job was joined" in printed[0]


def test_a_node_with_another_number_of_workers_is_refused(port):
    first = begin("", port, 0, ["--timeout", "8"])
    other = begin("", port, 1, local=1)
    printed, _ = other.communicate(timeout=60)
    assert other.returncode == 2
    assert "node 0 was started with 4 workers, 2 on each node; NODE_RANK 1 was not" in printed
    first.kill()
    first.communicate()


@pytest.mark.parametrize(("workers", "local", "node"), [(4, 3, 0), (4, 2, 2), (4, 8, 0)])
def test_numbers_that_do_not_fit_are_refused(port, workers, local, node):
    (printed,) = finish([begin("", port, node, local=local, workers=workers)], [2])
    assert "workers must be a multiple of those of a node" in printed
