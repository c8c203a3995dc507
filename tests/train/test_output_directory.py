"""One run in an output directory, seen by all its ranks; results of an earlier run are not lost by accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mindllm.config import load_config, override_config
from mindllm.errors import RunFailed, UserError
from mindllm.process.exit_hooks import tidy_up
from mindllm.train.checkpoint import CheckpointStore, RankTensors
from mindllm.train.job import output_directory
from mindllm.train.job.output_directory import LOCK_NAME, RunLock, claim_output_directory, meet_ranks
from mindllm.train.job.ranks import SINGLE_RANK

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "llama2" / "pretrain_llama2_tiny.yaml"


@pytest.fixture
def config(tmp_path):
    yield override_config(load_config(TINY), {"output_dir": str(tmp_path / "out")})
    tidy_up()


def earlier_run(directory):
    CheckpointStore(directory / "checkpoint").save(40, {0: RankTensors({"w": np.zeros(2)}, {})}, {})
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 43)))


def test_an_empty_directory_is_claimed(config):
    assert claim_output_directory(config, SINGLE_RANK).count == 1


def test_an_earlier_run_is_not_begun_anew_by_accident(config, tmp_path):
    earlier_run(tmp_path / "out")
    with pytest.raises(
        UserError, match=r"42 steps in metrics\.jsonl and checkpoint llm-40.*--resume_training.*--overwrite"
    ):
        claim_output_directory(config, SINGLE_RANK)


@pytest.mark.parametrize("change", [{"overwrite": True}, {"resume_training": True}, {"resume_training": "auto"}])
def test_it_is_gone_on_with_or_begun_anew_when_that_is_meant(config, tmp_path, change):
    earlier_run(tmp_path / "out")
    claim_output_directory(override_config(config, change), SINGLE_RANK)


def test_metrics_without_a_step_are_no_run(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step"')
    claim_output_directory(config, SINGLE_RANK)


HOLDER = """
import sys
from pathlib import Path
from mindllm.train.job.output_directory import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_trainer_is_told_who_the_first_is_and_a_dead_one_is_in_nobodys_way(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert holder.stdout.readline() == "held\n"
    lock = RunLock(tmp_path)
    with pytest.raises(UserError, match=f"is in use: process {holder.pid} on {os.uname().nodename} trains there"):
        lock.acquire()
    holder.kill()
    holder.communicate()
    lock.acquire()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    lock.release()
    RunLock(tmp_path).acquire()


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/out: not writable \(Not a directory\)"):
        RunLock(tmp_path / "file" / "out").acquire()


def roll(directories, timeout=20.0):
    """Every rank calls the roll in its directory; the name of the run, or the error."""

    def call(rank):
        try:
            return meet_ranks(directories[rank], rank, len(directories), timeout)
        except RunFailed as error:
            return str(error)

    with ThreadPoolExecutor(len(directories)) as pool:
        return list(pool.map(call, range(len(directories))))


def test_all_ranks_agree_on_the_name_of_the_run_and_the_next_run_has_another(tmp_path):
    names = [roll([tmp_path] * 4) for _ in range(3)]
    assert all(len(set(found)) == 1 for found in names)
    assert len({found[0] for found in names}) == 3


def test_a_directory_of_one_node_alone_is_refused_and_its_ranks_are_named(tmp_path):
    shared, local = tmp_path / "shared", tmp_path / "local"
    first, _, third, fourth = roll([shared, shared, local, local], timeout=2.0)
    assert "ranks 2, 3 did not appear in" in first
    assert "a directory shared by all nodes" in first
    assert "rank 0 did not answer in" in third
    assert "rank 0 did not answer in" in fourth


def test_ranks_of_a_run_that_died_are_not_taken_for_this_one(tmp_path):
    roll([tmp_path] * 3)
    first, _ = roll([tmp_path, tmp_path / "elsewhere"], timeout=2.0)
    assert "rank 1 did not appear" in first


def test_only_the_first_rank_locks(config, monkeypatch):
    monkeypatch.setattr(output_directory, "meet_ranks", lambda *_: "name")

    class Second:
        rank, count, is_first = 1, 2, False

        def sum(self, values):
            return list(values)

    peers = claim_output_directory(config, Second())
    assert (peers.rank, peers.count, peers.token) == (1, 2, "name")
    assert peers.agree(True)
    assert not peers.agree(False)
    assert not (Path(config.output_dir) / LOCK_NAME).exists()
