"""Compiling many ranks: errors of the user, graphs kept by content, and a cache that does not grow for ever."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from execute_clusters import compiled_cluster
from small_cluster import cluster_run

from mindllm.compiled.device.front_end import _World
from mindllm.compiled.rank import compile_ranks as subject
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.compiled.rank.rank_group import RANK_CODE, group_ranks, run_forks
from mindllm.errors import UserError
from mindllm.jobs.pool import Outcome, Task
from mindllm.jobs.worker import LOG


def test_a_compiled_step_is_not_compiled_again(graph_cache, monkeypatch):
    cluster = compiled_cluster("slices", graph_cache)
    assert [graph.rank for graph in cluster.graphs] == [0, 1]

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    again = subject.compile_ranks(cluster.config, graph_cache)
    assert again == cluster.graphs


@pytest.mark.slow
def test_a_fork_that_finds_sources_parsed_compiles_what_a_process_of_its_own_does():
    config = cluster_run(dp=2, parallel={"enable_parallel_optimizer": True})
    forked = subject.compile_ranks(config, workers=1)[1]
    alone = compile_rank(config, 1)
    assert forked.parameters == alone.parameters
    assert [(node.op, node.shapes, node.attributes.get("group_rank_ids")) for node in forked.nodes()] == [
        (node.op, node.shapes, node.attributes.get("group_rank_ids")) for node in alone.nodes()
    ]
    assert forked.sources == alone.sources


def test_ranks_are_built_alike_but_for_groups_of_their_own_and_an_embedding_used_twice():
    def groups(**model):
        config = cluster_run(dp=2, pp=2, micro=2, model=model)
        return len(group_ranks(config, range(4)))

    assert groups() == 1
    assert groups(tie_word_embeddings=True) == 2
    assert groups(pet_config={"pet_type": "galore", "galore_rank": 4}) == 4


def test_a_process_that_begins_no_rank_says_why_itself(monkeypatch):
    monkeypatch.setattr(subject, "tree_of", lambda config: {"modle": {}})
    with pytest.raises(UserError, match="modle") as caught:
        subject.compile_ranks(cluster_run(dp=2), workers=1)
    assert "memory" not in str(caught.value)


def test_a_rank_that_is_needed_before_the_compiler_asks_is_no_number():
    world = _World(None, 8, lambda: 5)
    for too_early in (world.get_rank_id, lambda: world.create_group("2-own", 2, [4, 5])):
        with pytest.raises(RuntimeError, match="needed before the compiler asks"):
            too_early()


def test_once_a_rank_has_failed_no_other_is_begun():
    begun, ended = [], []
    processes = []  # or the next one that is started takes the exit code of one that nobody holds

    def start(rank):
        begun.append(rank)
        processes.append(subprocess.Popen([sys.executable, "-c", f"raise SystemExit({int(rank == 1)})"]))
        return processes[-1].pid

    run_forks(range(6), 1, start, lambda rank, code: ended.append(rank))
    assert begun == ended == [0, 1]


def test_a_rank_whose_compiler_crashes_is_said_to_have_been_ended_by_a_signal(tmp_path):
    """As MindSpore's does where it compiles an evaluation of several chunks; it is not out of memory."""
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / LOG).write_text("compiling\n")
    (tmp_path / "3" / RANK_CODE).write_text(str(-signal.SIGSEGV))
    work = subject.LocalRanks(cluster_run(dp=4), True, tmp_path, 1)
    said = str(work._failure(Outcome(Task("compiling rank 2", "", ({}, [2, 3])), 1)))
    work.kill()
    assert "compiling rank 3 failed (MindSpore's compiler was ended by SIGSEGV)" in said
    assert "memory" not in said


def test_what_the_user_did_wrong_comes_back_as_such():
    config = cluster_run(tp=2, recompute_config={"select_recompute": [r"feed_forward\.w9\.matmul"]})
    with pytest.raises(UserError, match=r"recompute_config\.select_recompute: pattern .*w9.* matches no operator"):
        subject.compile_ranks(config)


def test_a_kept_graph_that_is_damaged_is_compiled_again(tmp_path, monkeypatch):
    def load(path, pool):
        if path.read_bytes() != b"good":
            raise UserError(f"{path}: damaged")
        return path.name

    def start(self, ranks):
        started.append(list(ranks))
        for rank in ranks:
            file = subject.graph_in(self._temporary, rank)
            file.parent.mkdir()
            file.write_bytes(b"good")

    started = []
    monkeypatch.setattr(subject, "load", load)
    monkeypatch.setattr(subject.RankCompilation, "_start", start)
    with subject.RankCompilation(cluster_run(dp=2), tmp_path) as compilation:
        assert compilation.graphs() == ["rank_0.graph", "rank_1.graph"]
    damaged = next(tmp_path.rglob("rank_1.graph"))
    damaged.write_bytes(b"bad")
    with subject.RankCompilation(cluster_run(dp=2), tmp_path) as compilation:
        assert compilation.graphs() == ["rank_0.graph", "rank_1.graph"]
    assert started == [[0, 1], [1]]
    assert damaged.read_bytes() == b"good"
