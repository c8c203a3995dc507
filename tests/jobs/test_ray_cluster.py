"""A real Ray cluster of several node processes on this machine, one of which is killed in the middle."""

from __future__ import annotations

import os
import threading
import time

import pytest
from small_cluster import cluster_run

from mindllm.config import load_config
from mindllm.errors import RunFailed, UserError
from mindllm.jobs import ray_cluster
from mindllm.jobs.pool import Task
from mindllm.jobs.ray_cluster import RayPool

ray = pytest.importorskip("ray")
SHARED_BYTES = 80 << 20  # the least that a node's store of objects may have
NODE = {"num_cpus": 1, "object_store_memory": SHARED_BYTES, "memory": 4 << 30}


@pytest.fixture(scope="module")
def cluster():
    """A head without cores of its own and two nodes of one core each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "memory": 1 << 30})
    made.add_node(**NODE)
    made.add_node(**NODE)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def spread_here(cluster, monkeypatch):
    """The executor of this process is that cluster."""
    monkeypatch.setenv(ray_cluster.VARIABLE, ray_cluster.RAY)
    monkeypatch.setenv(ray_cluster.ADDRESS, cluster.address)
    return cluster


def run(*tasks):
    """The values of tasks, in their order."""
    with RayPool() as pool:
        for task in tasks:
            pool.submit(task)
        values = {id(outcome.task): outcome.value for outcome in pool.outcomes()}
    return [values[id(task)] for task in tasks]


def test_tasks_return_values(spread_here):
    assert run(*[Task(f"{number}", "operator:mul", (number, number)) for number in range(5)]) == [0, 1, 4, 9, 16]


def test_a_file_that_a_task_writes_comes_back(spread_here, tmp_path):
    (tmp_path / "there").write_bytes(b"content")
    (value,) = run(Task("copying", "shutil:copyfile", (str(tmp_path / "there"),), output=tmp_path / "here"))
    assert (tmp_path / "here").read_bytes() == value == b"content"


@pytest.mark.slow
def test_work_is_done_in_other_processes(spread_here):
    assert os.getpid() not in run(Task("a", "os:getpid"), Task("b", "os:getpid"))


def test_a_mistake_of_the_user_comes_back_as_it_is(spread_here):
    with pytest.raises(UserError, match="no_such_run"):
        run(Task("loading", "mindllm.config:load_config", ("no_such_run.yaml",)))


@pytest.mark.slow
def test_what_ends_a_process_again_and_again_fails(spread_here, monkeypatch):
    monkeypatch.setattr(ray_cluster, "RETRIES", 1)
    with pytest.raises(RunFailed, match="ending: the cluster could not do it"):
        run(Task("ending", "os:_exit", (3,)))


def test_work_that_no_node_has_memory_for_is_refused(spread_here):
    with pytest.raises(UserError, match="largest node"):
        run(Task("a giant", "os:getpid", memory=1 << 50))


def test_a_node_that_is_killed_loses_nothing(spread_here):
    victim = spread_here.add_node(**NODE)
    killed = threading.Timer(2.0, lambda: spread_here.remove_node(victim, allow_graceful=False))
    killed.start()
    assert run(*[Task(f"{number}", "time:sleep", (1.5,)) for number in range(6)]) == [None] * 6
    killed.join()
    deadline = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert sum(node["Alive"] for node in ray.nodes()) == 3


def test_a_search_on_the_cluster_finds_what_it_finds_here(spread_here, monkeypatch):
    from mindllm.strategies import search as module
    from mindllm.strategies.search import search
    from mindllm.timing.device import read_device

    monkeypatch.setattr(module, "TOGETHER", 20)
    config, device = load_config("configs/llama2/pretrain_llama2_7b_8p.yaml"), read_device("atlas_800t_a2")
    there = search(config, 8, config.global_batch_size, device, 58 << 30)
    monkeypatch.setenv(ray_cluster.VARIABLE, ray_cluster.LOCAL)
    here = search(config, 8, config.global_batch_size, device, 58 << 30)
    assert [one.tree() for one in there.judged] == [one.tree() for one in here.judged]
    assert there.left_out == here.left_out


@pytest.mark.slow
def test_ranks_compiled_on_the_cluster_are_those_compiled_here(spread_here, monkeypatch):
    from mindllm.compiled.rank.compile_ranks import compile_ranks

    config = cluster_run(dp=2)
    there = compile_ranks(config)
    monkeypatch.setenv(ray_cluster.VARIABLE, ray_cluster.LOCAL)
    here = compile_ranks(config)
    assert [graph.rank for graph in there] == [0, 1]
    assert [len(list(graph.nodes())) for graph in there] == [len(list(graph.nodes())) for graph in here]


@pytest.mark.slow
def test_a_dry_run_survives_the_loss_of_a_node(spread_here, monkeypatch, tmp_path):
    """The figures are those of this machine alone, though a node is lost while it simulates."""
    from mindllm.dry_run.run import simulate
    from mindllm.dry_run.simulations import simulations_here

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    config, victim = cluster_run(dp=2, pp=2, micro=4), spread_here.add_node(**NODE)
    begun = time.monotonic()
    killed = threading.Timer(8.0, lambda: spread_here.remove_node(victim, allow_graceful=False))
    killed.start()
    there = simulate(config, simulations_here())
    assert time.monotonic() - begun > 8
    killed.join()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    monkeypatch.setenv(ray_cluster.VARIABLE, ray_cluster.LOCAL)
    assert there.to_dict() == simulate(config, simulations_here()).to_dict()


def test_without_a_cluster_it_says_how_to_start_one(monkeypatch):
    ray.shutdown()
    monkeypatch.setenv(ray_cluster.ADDRESS, "127.0.0.1:1")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1: no Ray cluster answers.*ray start --head"):
        ray_cluster.connected()


def test_an_unknown_executor_is_refused(monkeypatch):
    monkeypatch.setenv(ray_cluster.VARIABLE, "rya")
    with pytest.raises(UserError, match="did you mean 'ray'"):
        ray_cluster.is_spread()
