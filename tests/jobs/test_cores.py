"""Processes that share cores: never more of them work than there are, and one that ends gives its core back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from mindllm.jobs.cores import FILE, KEPT, VARIABLE, Core, cores, first_core_kept, shared_cores

WORKS = """
import sys, time
from pathlib import Path
from mindllm.jobs.cores import Core
with Core():
    mark = Path(sys.argv[1])
    mark.touch()
    time.sleep(float(sys.argv[2]))
    print(len(list(mark.parent.glob("at_work_*"))))
    mark.unlink()
"""


def begin(directory: Path, name: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKS, str(directory / f"at_work_{name}"), str(seconds)]
    environment = {**os.environ, VARIABLE: str(directory)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_no_more_processes_work_than_there_are_cores(tmp_path):
    for number in range(2):
        (tmp_path / f"{FILE}{number}").touch()
    processes = [begin(tmp_path, str(number), 0.3) for number in range(5)]
    assert max(int(process.communicate()[0]) for process in processes) == 2


def test_a_killed_process_gives_its_core_back(tmp_path):
    (tmp_path / f"{FILE}0").touch()
    killed = begin(tmp_path, "killed", 60)
    while not (tmp_path / "at_work_killed").exists():
        time.sleep(0.02)
    waiting = begin(tmp_path, "waiting", 0)
    killed.kill()
    killed.communicate()
    assert waiting.communicate(timeout=30)[0]


def test_a_core_given_back_is_free(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / f"{FILE}0").touch()
    core = Core()
    core.give_back()
    with Core():  # waits for ever if it is not
        core.give_back()  # twice is as good as once


def test_the_first_core_is_left_to_who_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for number in range(2):
        (tmp_path / f"{FILE}{number}").touch()
    with first_core_kept():
        other = begin(tmp_path, "other", 0.5)
        third = begin(tmp_path, "third", 0)
        assert [int(process.communicate(timeout=30)[0]) for process in (other, third)] == [1, 1]  # one after another
        with Core(keeper=True):
            assert int(begin(tmp_path, "beside", 0).communicate(timeout=30)[0]) == 1
    with Core():  # both are everybody's again
        assert int(begin(tmp_path, "behind", 0).communicate(timeout=30)[0]) == 1


def test_a_single_core_is_kept_until_the_block_ends(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / f"{FILE}0").touch()
    with first_core_kept():
        waiting = begin(tmp_path, "waiting", 0)
        time.sleep(0.5)
        assert waiting.poll() is None
        assert not (tmp_path / "at_work_waiting").exists()
    assert waiting.communicate(timeout=30)[0]


def test_where_none_are_shared_nobody_waits(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with first_core_kept():
        Core().give_back()
    for core in [Core() for _ in range(cores() + 1)]:
        core.give_back()


def test_as_many_are_shared_as_there_are(tmp_path):
    assert shared_cores(tmp_path) == {VARIABLE: str(tmp_path)}
    assert len(list(tmp_path.glob(f"{FILE}*"))) == cores()
    assert (tmp_path / KEPT).exists()
