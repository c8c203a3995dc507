"""Several processes save one checkpoint through the file system: whole when all have written, else named and absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mindllm.errors import UserError
from mindllm.train.checkpoint import CheckpointNotSavedError, CheckpointStore, Part, Peers, RankTensors, load_checkpoint
from mindllm.train.checkpoint import store as store_module
from mindllm.train.checkpoint.joint import ABANDONED

WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)
REPOSITORY = Path(__file__).parents[2]


class Agreement:
    """What ranks in threads agree upon."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.answers: list[bool] = []

    def __call__(self, answer: bool) -> bool:
        self.answers.append(answer)
        self.barrier.wait(30)
        result = all(self.answers)
        if self.barrier.wait(30) == 0:
            self.answers.clear()
        self.barrier.wait(30)
        return result


def stores(directory, count=3, timeout=30.0, **options):
    agree = Agreement(count)
    return [
        CheckpointStore(directory, peers=Peers(rank, count, "this run", agree, timeout), **options)
        for rank in range(count)
    ]


def held(rank, count=3):
    """Rows of one tensor cut among the ranks, and one that every rank holds whole."""
    rows = len(WHOLE) // count
    cut = (slice(rank * rows, (rank + 1) * rows), slice(0, 4))
    return {rank: RankTensors({"cut": Part(WHOLE.shape, cut, WHOLE[cut])}, {"whole": WHOLE * 2})}


def save_all(ranks, step, tensors=held):
    """Every rank saves in a thread of its own; what each returned or raised."""

    def save(store):
        try:
            return store.save(step, tensors(store.peers.rank), {"rank": store.peers.rank})
        except CheckpointNotSavedError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(save, ranks))


def test_parts_of_all_ranks_make_one_checkpoint_and_copies_are_written_once(tmp_path):
    ranks = stores(tmp_path)
    assert save_all(ranks, 7) == [tmp_path / "llm-7"] * 3
    assert sorted(path.name for path in (tmp_path / "llm-7").iterdir()) == [
        "manifest.json",
        *[f"model-{rank:05d}-of-00003.safetensors" for rank in range(3)],
        "optimizer-00000-of-00003.safetensors",
        "state.json",
    ]
    checkpoint = load_checkpoint(tmp_path / "llm-7")
    assert np.array_equal(checkpoint.weights["cut"], WHOLE)
    assert np.array_equal(checkpoint.slice("whole", [1, 2], [3, 1]), WHOLE[1:4, 2:3] * 2)
    assert checkpoint.state == {"rank": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["llm-7"]


def test_with_redundancy_every_rank_writes_all_it_holds(tmp_path):
    save_all(stores(tmp_path, remove_redundancy=False), 7)
    assert len(list((tmp_path / "llm-7").glob("optimizer-*"))) == 3
    assert np.array_equal(load_checkpoint(tmp_path / "llm-7").optimizer["whole"], WHOLE * 2)


def test_a_replica_that_another_rank_holds_is_not_written(tmp_path):
    def replicas(rank):
        part = Part(WHOLE.shape, (slice(0, 6), slice(0, 4)), WHOLE, replica=rank)
        return {rank: RankTensors({"same": part}, {})}

    save_all(stores(tmp_path), 1, replicas)
    assert [path.name for path in (tmp_path / "llm-1").glob("model-*")] == ["model-00000-of-00003.safetensors"]


def test_the_same_step_again_replaces_the_first(tmp_path):
    ranks = stores(tmp_path)
    save_all(ranks, 7)
    assert save_all(ranks, 7, lambda rank: {rank: RankTensors({"w": WHOLE + 5}, {})}) == [tmp_path / "llm-7"] * 3
    assert list(load_checkpoint(tmp_path / "llm-7").weights) == ["w"]


def test_a_rank_that_cannot_write_is_named_and_the_next_save_is_good(tmp_path, monkeypatch):
    ranks, write = stores(tmp_path), store_module.write_file

    def full(path, role, writer):
        if "model-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, role, writer)

    monkeypatch.setattr(store_module, "write_file", full)
    first, second, third = save_all(ranks, 7)
    assert "rank 1 could not write its part: [Errno 28] No space left on device" in str(first)
    assert "llm-7 was not saved: No space left on device" in str(second)
    assert "rank 0 has abandoned it" in str(third)
    monkeypatch.undo()
    assert save_all(ranks, 8) == [tmp_path / "llm-8"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["llm-8"]


def test_a_rank_whose_file_is_removed_is_told_who_gave_up(tmp_path, monkeypatch):
    ranks, write = stores(tmp_path), store_module.write_file

    def overtaken(path, role, writer):
        if "model-00001" in path.name:
            raise OSError(28, "No space left on device")
        if "model-00002" in path.name:
            while not (path.parent / ABANDONED).exists():
                time.sleep(0.01)
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return write(path, role, writer)

    monkeypatch.setattr(store_module, "write_file", overtaken)
    assert "rank 0 has abandoned it" in str(save_all(ranks, 7)[2])


def test_a_rank_that_never_comes_is_named_when_its_time_is_over(tmp_path):
    ranks = stores(tmp_path, timeout=2.0)
    first, second = save_all([ranks[0], ranks[1]], 7)
    assert "rank 2 did not write into" in str(first)
    assert "every node must see the same directory" in str(first)
    assert isinstance(second, CheckpointNotSavedError)
    with pytest.raises(CheckpointNotSavedError, match="rank 0 has abandoned it"):
        ranks[2].save(7, held(2), {})
    ranks[0].recover()
    assert not list(tmp_path.iterdir())


def test_damage_that_one_rank_finds_is_damage_for_all(tmp_path):
    ranks = stores(tmp_path)
    save_all(ranks, 7)
    save_all(ranks, 9)
    victim = tmp_path / "llm-9" / "model-00001-of-00003.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda store: store.resume(True), ranks))
    assert [checkpoint.step for checkpoint in found] == [7, 7, 7]

    def refused(store):
        with pytest.raises(UserError) as error:
            store.resume(str(tmp_path / "llm-9"))
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        messages = list(pool.map(refused, ranks))
    assert sum("model-00001-of-00003.safetensors is altered" in message for message in messages) == 1
    assert sum("the log of another rank names the file" in message for message in messages) == 2
    assert all("llm-7" in message for message in messages)


SAVER = """
import sys
import numpy as np
from mindllm.train.checkpoint import CheckpointStore, Part, Peers, RankTensors

directory, rank = sys.argv[1], int(sys.argv[2])
store = CheckpointStore(directory, keep_checkpoint_max=2, peers=Peers(rank, 2, sys.argv[3], timeout=60))
for step in range(int(sys.argv[4]) + 1, 10**6):
    whole = np.full((200, 300), step, np.float32)
    cut = (slice(100 * rank, 100 * rank + 100), slice(0, 300))
    store.save(step, {rank: RankTensors({"w": Part(whole.shape, cut, whole[cut])}, {})}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_all_save_loses_nothing_announced(tmp_path, victim):
    directory, announced = tmp_path / "checkpoint", 0
    for attempt in range(3):
        CheckpointStore(directory).recover()
        command = [sys.executable, "-c", SAVER, str(directory)]
        savers = [
            subprocess.Popen(
                [*command, str(rank), f"run {attempt}", str(announced)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
            for rank in range(2)
        ]
        seen = [savers[victim].stdout.readline() for _ in range(3 + attempt)]
        savers[victim].send_signal(signal.SIGKILL)
        said = seen + savers[victim].communicate()[0].split()
        savers[1 - victim].kill()
        savers[1 - victim].communicate()
        newest = CheckpointStore(directory).resume(True)
        assert newest.step >= max(map(int, said))
        assert (np.asarray(newest.weights["w"]) == newest.step).all()
        announced = newest.step
