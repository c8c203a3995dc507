"""Signs of life: who hangs, told from what each rank has last said."""

import os

import pytest

from mindllm.launch import heartbeat
from mindllm.launch.heartbeat import Beat, Heart, forget_beats, hanging, last_steps, named_ranks, read_beats


def beat(step=3, at=0.0, limit=10.0):
    return Beat(1, step, f"step {step + 1}", at, limit)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([7, 0, 1], "ranks 0-1, 7"), ([0, 2], "ranks 0, 2")],
)
def test_ranks_are_named_in_spans(ranks, text):
    assert named_ranks(ranks) == text


def test_steps_are_told_highest_first():
    assert last_steps({0: beat(4), 1: beat(3), 2: beat(4)}) == "last step of each rank: 4 (ranks 0, 2), 3 (rank 1)"
    assert last_steps({}) == ""


def test_nobody_hangs_while_every_sign_of_life_is_recent_or_there_is_no_limit():
    assert hanging({0: beat(), 1: beat()}, [0], now=9.0) == []
    assert hanging({0: beat(limit=0.0)}, [], now=1e9) == []


def test_the_one_the_others_wait_for_hangs_though_theirs_is_overdue_too():
    assert hanging({0: beat(at=-1), 1: beat(at=1), 2: beat(at=-1)}, [0, 2], now=11.5) == [1]


def test_nobody_hangs_while_the_one_the_others_wait_for_gives_signs_of_life():
    assert hanging({0: beat(), 1: beat(at=95.0), 2: beat()}, [0, 2], now=100.0) == []


def test_where_nobody_is_known_to_wait_all_that_are_overdue_are_named():
    assert hanging({0: beat(), 1: beat(at=5.0), 2: beat()}, [], now=12.0) == [0, 2]


def test_the_first_step_of_a_process_may_take_longer(tmp_path, monkeypatch):
    monkeypatch.setenv(heartbeat.DIRECTORY, str(tmp_path))
    monkeypatch.setenv("RANK_ID", "2")
    heart = Heart()
    heart.start(10)
    limits = []
    for step in (None, 6, 6, 7, 7):
        heart.beat("step", step)
        found = read_beats(tmp_path, range(4))[2]
        limits.append(found.limit)
        assert found.trained == (found.limit == 10.0)
    assert limits == [100.0, 100.0, 100.0, 10.0, 10.0]
    assert (found.pid, found.step) == (os.getpid(), 7)
    forget_beats(tmp_path, range(4))
    assert read_beats(tmp_path, range(4)) == {}


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(heartbeat.DIRECTORY, raising=False)
    monkeypatch.chdir(tmp_path)
    heart = Heart()
    heart.start(10)
    heart.beat("step", 1)
    assert not list(tmp_path.iterdir())
