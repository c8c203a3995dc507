"""Nodes of one acceptance: who comes, what node 0 says and hears, and how both ends leave; the runs are stand-ins here."""

import errno
import os
import threading
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from mindllm.accept import follow as follow_module
from mindllm.accept import nodes as nodes_module
from mindllm.accept.follow import follow
from mindllm.accept.measured import alone, job_of
from mindllm.accept.nodes import NodeLost, Nodes
from mindllm.cli import accept as command
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.launch.clusters.schedulers import OF_A_TASK
from mindllm.launch.job import JobStopped

STATES = [("devices", "good"), ("host memory", "unknown")]


class Other(threading.Thread):
    """A node other than the first, in a thread; its part of every run takes until node 0 has ended its own."""

    def __init__(self, place, here=0):
        super().__init__(daemon=True)
        self.place, self.here, self.said = place, here, []
        self.code = self.error = None

    def run(self):
        try:
            self.code = follow(self.place, self.here, self.said.append)
        except BaseException as error:
            self.error = error

    def end(self):
        self.join(20)
        assert not self.is_alive()
        return self.code if self.error is None else self.error


@pytest.fixture
def ran(monkeypatch):
    """What each node has started: number and job."""
    found = []

    def start(wanted, go_on=lambda: None):
        found.append((wanted.node_rank, wanted))
        go_on()
        return 0

    for module in (follow_module, nodes_module):
        monkeypatch.setattr(module, "start_job", start)
    monkeypatch.setattr(follow_module, "node_states", lambda place, here: STATES)
    return found


@pytest.fixture
def places(tmp_path, port):
    """Of two nodes with two devices each."""
    first = replace(alone(tmp_path, False), workers=4, local_workers=2, port=port, timeout=20)
    return first, replace(first, node_rank=1)


def meet(places, **options):
    """Node 0, not entered yet, and node 1, which looks for it."""
    other = Other(places[1], **options)
    other.start()
    return Nodes(places[0]), other


def test_every_node_takes_part_in_a_run_and_ends_as_node_0(places, ran, tmp_path):
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        nodes.ask_to_check()
        assert nodes.checked() == [STATES]
        assert nodes.run("dp", job_of(tmp_path / "runs" / "dp", places[0], 4, 2)) == 0
        nodes.code = 3
    assert other.end() == 3
    jobs = dict(ran)
    assert [(job.workers, [*job.ranks]) for _, job in sorted(jobs.items())] == [(4, [0, 1]), (4, [2, 3])]
    assert jobs[0].command == jobs[1].command
    assert jobs[1].command[-1] == str(tmp_path / "runs" / "dp.yaml")
    assert jobs[0].shared_dir == jobs[1].shared_dir
    assert jobs[0].log_dir != jobs[1].log_dir


def test_a_run_of_one_node_leaves_the_others_waiting(places, ran, tmp_path):
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        nodes.run("recompute", job_of(tmp_path / "runs" / "recompute", places[0], 2, 2))
        nodes.code = 0
    assert other.end() == 0
    assert [number for number, _ in ran] == [0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 2),
        (CheckFailed("x"), 3),
        (OSError("x"), 1),
        (PermissionError(errno.EACCES, "x"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_others_end_with_the_exit_code_of_an_error_of_node_0(error, code, places, ran):
    nodes, other = meet(places)

    def begin():
        with nodes:
            nodes.gather()
            raise error

    with pytest.raises(type(error)):
        begin()
    assert other.end() == code


@pytest.mark.parametrize("delay", [0.0, 0.5], ids=["at once", "hears of its beginning and its end together"])
def test_a_run_that_fails_on_node_0_ends_on_the_others(delay, places, ran, monkeypatch, tmp_path):
    def wait(wanted, go_on):
        while True:
            go_on()
            time.sleep(0.02)

    def fail(wanted, go_on):
        raise RunFailed("no port")

    monkeypatch.setattr(follow_module, "start_job", wait)
    monkeypatch.setattr(nodes_module, "start_job", fail)
    monkeypatch.setattr(follow_module, "node_states", lambda place, here: time.sleep(delay) or STATES)
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        nodes.ask_to_check()
        with pytest.raises(RunFailed, match="no port"):
            nodes.run("dp", job_of(tmp_path / "runs" / "dp", places[0], 4, 2))
        nodes.code = 1
    assert other.end() == 1
    assert "dp: it has ended on node 0, whose output says why" in other.said


def test_a_part_that_fails_on_another_node_ends_the_run_on_node_0(places, ran, monkeypatch, tmp_path):
    def wait(wanted, go_on):
        while True:
            go_on()
            time.sleep(0.02)

    def fail(wanted, go_on):
        raise UserError("there is no msrun here")

    monkeypatch.setattr(nodes_module, "start_job", wait)
    monkeypatch.setattr(follow_module, "start_job", fail)
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        with pytest.raises(RunFailed, match="node 1 could not take part"):
            nodes.run("dp", job_of(tmp_path / "runs" / "dp", places[0], 4, 2))
    assert other.end() == 1
    assert "dp: there is no msrun here" in other.said


def test_a_stop_before_another_node_has_joined_a_run_stops_the_acceptance(places, ran, monkeypatch, tmp_path):
    def wait(wanted, go_on):
        while True:
            go_on()
            time.sleep(0.02)

    def stop(wanted, go_on):
        raise JobStopped("stopped before the job was joined", 130)

    monkeypatch.setattr(nodes_module, "start_job", wait)
    monkeypatch.setattr(follow_module, "start_job", stop)
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        with pytest.raises(KeyboardInterrupt):
            nodes.run("dp", job_of(tmp_path / "runs" / "dp", places[0], 4, 2))
    assert isinstance(other.end(), KeyboardInterrupt)


def test_a_node_that_is_gone_is_lost_to_every_run_of_all_nodes_and_to_no_other(places, ran, tmp_path):
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        nodes._others[1].line.close_heard(0)
        nodes._others[1].gone = True
        with pytest.raises(NodeLost) as found:
            nodes.run("dp", job_of(tmp_path / "runs" / "dp", places[0], 4, 2))
        assert found.value.said == "node 1 was lost"
        assert nodes.run("recompute", job_of(tmp_path / "runs" / "recompute", places[0], 2, 2)) == 0
    assert str(other.end()).startswith("node 0 is gone")


def test_a_node_that_stops_while_it_waits_interrupts_the_acceptance(places, ran, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(follow_module, "node_states", interrupted)
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        nodes.ask_to_check()
        assert nodes.checked() == [[("answer", "no")]]
        assert nodes.is_stopped()
    assert isinstance(other.end(), KeyboardInterrupt)


@pytest.mark.parametrize(
    "states", [[("buildbox-17", "good")], [("devices", "buildbox")], [["devices"]], [(1, "good")], 3]
)
def test_what_is_no_state_of_preflight_is_not_taken(states, places, ran, monkeypatch):
    monkeypatch.setattr(follow_module, "node_states", lambda place, here: states)
    nodes, other = meet(places)
    with nodes:
        nodes.gather()
        nodes.ask_to_check()
        assert nodes.checked() == [[("answer", "no")]]
    other.end()


OTHERWISE = {
    "node 1 with 8 devices, 4 on each node": {"workers": 8, "local_workers": 4},
    "--node_rank 2: node 0 waits for nodes 1 to 1": {"node_rank": 2},
}


@pytest.mark.parametrize("told", OTHERWISE)
def test_a_node_that_was_started_otherwise_is_told_so_and_so_is_node_0(told, places, ran):
    nodes, other = meet((places[0], replace(places[1], **OTHERWISE[told])))
    with pytest.raises(UserError, match=told), nodes:
        nodes.gather()
    assert told in str(other.end())


def test_a_directory_by_another_path_is_refused(places, ran, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(follow_module, "secret_of", lambda place: nodes_module.secret_of(places[0]))
    nodes, other = meet((places[0], replace(places[1], shared_dir=elsewhere)))
    with pytest.raises(UserError, match="give one directory by one path"), nodes:
        nodes.gather()
    assert "--output is " in str(other.end())


def test_a_node_without_devices_beside_one_that_has_some_is_named(places, ran):
    nodes, other = meet(places, here=8)
    with pytest.raises(UserError, match="node 1 sees 8 Ascend devices, node 0 0; check the driver"), nodes:
        nodes.gather()
    assert other.end() == 2


def test_the_fewest_devices_of_a_node_count(places, ran):
    other = Other(places[1], here=4)
    other.start()
    with Nodes(places[0], 8) as nodes:
        nodes.gather()
        assert nodes.devices_here == 4
        nodes.code = 0
    assert other.end() == 0


def placed(monkeypatch, *, here=0, variables=None, **options):
    """The place that the command takes."""
    for name in OF_A_TASK:
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables or {}).items():
        monkeypatch.setenv(name, value)
    names = ("devices", "local_workers", "master_addr", "node_rank")
    given = {**dict.fromkeys(names), "port": 0, "timeout": 600, "output": Path("accept"), **options}
    return command._place(Namespace(**given), here)


SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "40",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "MASTER_ADDR": "10.0.0.1",
}


def test_a_task_of_slurm_takes_its_place_and_all_devices_of_all_nodes(monkeypatch):
    place = placed(monkeypatch, here=8, variables=SLURM)
    assert (place.workers, place.local_workers, place.node_rank, place.master_addr) == (16, 8, 1, "10.0.0.1")
    assert place.msrun
    assert "SLURM_STEP_NUM_TASKS" not in os.environ, "a run of one device that is started here is no task"
    assert placed(monkeypatch, variables={**SLURM, "SLURM_STEP_NUM_TASKS": "4"}).workers == 4, "a process of each CPU"


def test_tasks_that_share_a_machine_are_refused(monkeypatch):
    with pytest.raises(UserError, match="start one on each: --ntasks-per-node=1"):
        placed(monkeypatch, here=8, variables={**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"})


def test_options_of_a_node_come_before_a_scheduler_and_need_the_devices_of_all(monkeypatch):
    own = {"local_workers": 8, "master_addr": "10.0.0.2", "node_rank": 0, "port": 9000}
    place = placed(monkeypatch, here=8, variables=SLURM, devices=16, **own)
    assert (place.workers, place.local_workers, place.node_rank, place.master_addr) == (16, 8, 0, "10.0.0.2")
    assert nodes_module.control_port(place) == 9002
    with pytest.raises(UserError, match="--devices is missing"):
        placed(monkeypatch, here=8, **own)
    with pytest.raises(UserError, match="nodes are counted from 0"):
        placed(monkeypatch, here=8, devices=16, **{**own, "node_rank": 2})


def test_one_node_has_no_others_and_opens_no_port(monkeypatch):
    place = placed(monkeypatch, here=8)
    assert (place.workers, place.local_workers, place.node_rank) == (8, 8, 0)
    with Nodes(place) as nodes:
        nodes.gather()
        nodes.ask_to_check()
        assert (nodes.count, nodes.checked()) == (1, [])
        assert not nodes.is_stopped()
