"""`mindllm accept` on two nodes, here two commands on one machine with a process of its CPU each: one acceptance."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_accept_end_to_end import members, ranks_below

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(Path("/dev").glob("davinci[0-9]*")), reason="there are devices"),
]


def begin(output, port, *options):
    """Both nodes, node 1 first: the order in which they are started does not matter."""
    return [start(output, port, node, *options) for node in (1, 0)][::-1]


def start(output, port, node, *options):
    command = [sys.executable, "-m", "mindllm", "accept", "--output", str(output), "--json", "--devices", "2"]
    command += ["--local_workers", "1", "--master_addr", "127.0.0.1", "--port", str(port), "--node_rank", str(node)]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=output.parent,
        env={**os.environ, "GLOG_v": "3"},
    )  # fmt: skip


def end(nodes, expect, output):
    """What each has printed, on both streams; no rank may be left."""
    try:
        said = [node.communicate(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == expect, said
    assert not any("Traceback" in text for each in said for text in each), said
    assert ranks_below(output) == []
    return said


def until_both_train(output):
    """Until the ranks of both nodes have begun."""
    deadline = time.monotonic() + 200
    logs = [output / "runs" / "dp" / name for name in ("launch/worker_0.log", "launch_1/worker_1.log")]
    while not all(log.exists() for log in logs):
        assert time.monotonic() < deadline, "dp was not begun on both nodes"
        time.sleep(0.1)
    time.sleep(1.0)


def verdicts(output):
    tree = json.loads(members(output)["acceptance.json"])
    return tree, {claim["claim"]: claim["verdict"] for claim in tree["claims"]}


def test_replicas_of_both_nodes_have_the_losses_of_one_device(tmp_path, port):
    output = tmp_path / "accept"
    (out, _), (nothing, told) = end(begin(output, port, "--claims", "single,dp,tp", "--keep"), [0, 0], output)
    tree, found = verdicts(output)
    assert json.loads(out)["lines"] == tree["lines"]
    assert found == {"single": "not judged", "dp": "confirmed", "tp": "confirmed"}
    losses = {line["claim"]: line for line in tree["lines"] if line["figure"] == "loss"}
    assert losses["dp"]["detail"]["largest_difference"] < 1e-5
    assert "steps 1 to 4 of 4" in (output / "runs" / "dp" / "launch_1" / "worker_1.log").read_text(), (
        "the rank of node 1"
    )
    assert not (output / "runs" / "tp" / "launch").exists(), "ranks that share the model are executed on node 0"
    assert nothing == ""
    assert "node 1: takes part in dp" in told
    assert "takes part in tp" not in told
    assert {one["node"] for one in tree["preflight"]} == {0, 1}
    assert {"node": 1, "subject": "shared directory", "state": "good"} in tree["preflight"]
    page = members(output)["acceptance.html"]
    assert "Replicas were processes of all 2 nodes" in page
    assert "<th>node 1</th>" in page
    private = (str(tmp_path), "127.0.0.1", os.uname().nodename)
    assert [word for word in private for text in members(output).values() if word in text] == []


def test_a_node_that_is_killed_in_a_run_fails_its_claim_and_the_others_go_on(tmp_path, port):
    output = tmp_path / "accept"
    nodes = begin(output, port, "--claims", "single,dp,optimizer", "--keep")
    until_both_train(output)
    nodes[1].kill()
    (_, told), _ = end(nodes, [1, -signal.SIGKILL], output)
    tree, found = verdicts(output)
    assert found == {"single": "not judged", "dp": "failed", "optimizer": "confirmed"}
    assert next(line["why"] for line in tree["lines"] if line["claim"] == "dp") == "node 1 was lost"
    assert "was lost with its node" in told


@pytest.mark.parametrize("asked", [0, 1])
def test_ctrl_c_on_either_node_ends_both_and_keeps_what_is_done(tmp_path, port, asked):
    output = tmp_path / "accept"
    nodes = begin(output, port, "--claims", "single,dp,optimizer", "--keep")
    until_both_train(output)
    nodes[asked].send_signal(signal.SIGINT)
    end(nodes, [130, 130], output)
    tree, found = verdicts(output)
    assert found == {"single": "not judged", "dp": "not run", "optimizer": "not run"}
    assert tree["interrupted"]


def test_the_other_node_leaves_when_node_0_is_killed(tmp_path, port):
    output = tmp_path / "accept"
    nodes = begin(output, port, "--claims", "dp", "--keep")
    until_both_train(output)
    nodes[0].kill()
    _, (_, told) = end(nodes, [-signal.SIGKILL, 1], output)
    assert "node 0 is gone" in told


def test_a_node_that_never_comes_is_named_with_what_to_check(tmp_path, port):
    output = tmp_path / "accept"
    ((_, told),) = end([start(output, port, 0, "--timeout", "1")], [1], output)
    assert f"node 1 did not come to 127.0.0.1 port {port + 2} within 1 s: start the same command there" in told
    assert not (output / "acceptance.html").exists()


def test_a_directory_that_is_not_shared_is_told(tmp_path, port):
    nodes = [start(tmp_path / f"accept_{node}", port, node, "--timeout", "4") for node in range(2)]
    (_, first), (_, other) = end(nodes, [1, 1], tmp_path / "accept")
    assert "--output must be one directory" in other
    assert "--output must be one directory that both see" in first
