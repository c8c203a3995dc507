"""Memory of this machine: what is free within limits, what others have claimed, and that no more than a share is taken."""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mindllm.cache import user_cache
from mindllm.errors import RunFailed, UserError
from mindllm.jobs import memory as subject
from mindllm.jobs.memory import MemoryClaim
from mindllm.units import GIB, MIB

ANOTHER = """
import os, sys, time
from mindllm.jobs.memory import MemoryClaim
with MemoryClaim() as claim:
    claim.take({wanted})
    taken = bytearray(os.urandom(1)) * {taken}
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_claims(monkeypatch, tmp_path):
    """A directory of claims that nobody else uses, and a process that has claimed nothing."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(subject.VARIABLE, raising=False)
    monkeypatch.setattr(subject, "_claims", [])


@pytest.fixture
def another():
    """Starts a process that claims memory and takes some of it."""
    started = []

    def start(wanted: int, taken: int = 0) -> subprocess.Popen[bytes]:
        code = ANOTHER.format(wanted=wanted, taken=taken)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def machine(root: Path, available: int, group: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Files of a system with a control group: ``/proc`` and ``/sys/fs/cgroup``."""
    processes, groups = root / "proc", root / "cgroup"
    (processes / "self").mkdir(parents=True)
    (processes / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available >> 10} kB\n")
    (processes / "self" / "cgroup").write_text(group)
    for name, text in limits.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return processes, groups


def test_without_a_limit_the_machine_decides(tmp_path):
    limits = {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}
    assert subject.available_bytes(*machine(tmp_path, 7 * GIB, "0::/\n", limits)) == 7 * GIB


def test_the_limit_of_any_group_around_the_process_counts_and_pages_of_files_are_free(tmp_path):
    limits = {
        "job/memory.max": f"{4 * GIB}\n",
        "job/memory.current": f"{3 * GIB}\n",
        "job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "job/step/memory.max": "max\n",
        "job/step/memory.current": "1\n",
        "job/step/memory.stat": "",
    }
    assert subject.available_bytes(*machine(tmp_path, 7 * GIB, "0::/job/step\n", limits)) == 2 * GIB


def test_control_groups_of_version_1(tmp_path):
    limits = {
        "memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/box/memory.usage_in_bytes": f"{GIB}\n",
        "memory/box/memory.stat": "total_inactive_file 0\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": f"{5 * GIB}\n",
        "memory/memory.stat": "",
    }
    group = "5:cpu:/box\n4:memory:/box\n0::/\n"
    assert subject.available_bytes(*machine(tmp_path, 7 * GIB, group, limits)) == GIB


def test_a_system_that_does_not_say_is_unknown(tmp_path, monkeypatch):
    assert subject.available_bytes(tmp_path, tmp_path) is None
    monkeypatch.setattr(subject, "available_bytes", lambda: None)
    with MemoryClaim() as claim:
        assert claim.budget is None
        assert claim.fits(1 << 60)


@pytest.mark.parametrize("text", ["0", "1.5", "-1", "nan", "much"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write a number above 0 and at most 1"):
        subject.share(text)


def test_a_variable_that_is_no_share_is_told(monkeypatch):
    monkeypatch.setenv(subject.VARIABLE, "60%")
    with pytest.raises(UserError, match="MINDLLM_MEMORY_SHARE: 60% is not a share"):
        MemoryClaim().__enter__()


def test_the_option_holds_for_this_process_and_its_children(monkeypatch):
    parser = argparse.ArgumentParser()
    subject.add_memory_option(parser)
    monkeypatch.setenv(subject.VARIABLE, "0.5")
    monkeypatch.setattr(subject, "available_bytes", lambda: 10 * GIB)
    with MemoryClaim() as claim:
        assert claim.budget == 5 * GIB
    parser.parse_args(["--memory-share", "0.3"])
    with MemoryClaim() as claim:
        assert claim.budget == 3 * GIB
    assert os.environ[subject.VARIABLE] == "0.3"


def test_what_another_has_claimed_and_not_taken_is_not_free(monkeypatch, another):
    monkeypatch.setattr(subject, "available_bytes", lambda: 10 * GIB)
    another(4 * GIB)
    with MemoryClaim() as claim:
        assert 6 * GIB <= claim.free <= 6 * GIB + 64 * MIB


def test_what_another_has_taken_is_not_counted_twice(monkeypatch, another):
    """It is no longer among what the system calls free."""
    monkeypatch.setattr(subject, "available_bytes", lambda: 10 * GIB)
    another(300 * MIB, taken=200 * MIB)
    with MemoryClaim() as claim:
        assert 10 * GIB - 120 * MIB <= claim.free <= 10 * GIB - 36 * MIB


def test_claims_of_the_dead_are_forgotten(monkeypatch, another):
    monkeypatch.setattr(subject, "available_bytes", lambda: 10 * GIB)
    process = another(4 * GIB)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with MemoryClaim() as claim:
        assert claim.free == 10 * GIB
    assert [path.name for path in Path(os.environ["XDG_RUNTIME_DIR"], "mindllm").iterdir()] == [subject.LOCK]


def test_a_file_that_is_no_claim_disturbs_nobody(monkeypatch):
    monkeypatch.setattr(subject, "available_bytes", lambda: 10 * GIB)
    directory = own_directory()
    whole = b'{"pid": 1, "bytes": 5, "before": 0}'.ljust(subject.CLAIM_BYTES)
    others = {"nonsense": b"{[", "1.abcdefgh": b"", "2.abcdefgh": whole, "notes.txt": whole, "3.abcdefgh": b"[" * 256}
    for name, content in others.items():
        (directory / name).write_bytes(content)
    os.mkfifo(directory / "4.abcdefgh")
    (directory / "5.abcdefgh").symlink_to(directory / "notes.txt")
    before = sorted(directory.iterdir())
    with MemoryClaim() as claim:
        assert claim.free == 10 * GIB
    assert sorted(path for path in directory.iterdir() if path.name != subject.LOCK) == before
    assert (directory / "notes.txt").read_bytes() == whole


def own_directory() -> Path:
    """The directory of claims, which the first claim creates."""
    with subject.claim_directory():
        return Path(os.environ["XDG_RUNTIME_DIR"], "mindllm")


def link_to_files(place: Path, target: Path) -> None:
    place.symlink_to(target)


def open_to_all(place: Path, target: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def plain_file(place: Path, target: Path) -> None:
    place.write_text("mine")


@pytest.mark.parametrize("plant", [link_to_files, open_to_all, plain_file])
@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_planted_directory_is_not_used(variable, plant, tmp_path, monkeypatch, caplog):
    """A link at the name of the claims once had every file of its target removed."""
    shared, files = tmp_path / "shared", tmp_path / "files"
    shared.mkdir()
    files.mkdir()
    (files / "thesis.tex").write_text("years of work")
    (files / "1.abcdefgh").write_bytes(b'{"pid": 1, "bytes": 5, "before": 0}'.ljust(subject.CLAIM_BYTES))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(variable, str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)
    place = shared / ("mindllm" if variable == "XDG_RUNTIME_DIR" else f"mindllm-{os.geteuid()}")
    plant(place, files)
    subject._own_claims.cache_clear()
    with MemoryClaim() as claim:
        claim.take(MIB)
    assert sorted(path.name for path in files.iterdir()) == ["1.abcdefgh", "thesis.tex"]
    assert not place.is_dir() or plant is link_to_files or not any(place.iterdir())
    assert str(place) in caplog.text
    assert "remove it" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_not_used(tmp_path, caplog):
    (tmp_path / "mindllm").mkdir(mode=0o700)
    os.chown(tmp_path / "mindllm", 12345, 12345)
    subject._own_claims.cache_clear()
    with MemoryClaim() as claim:
        claim.take(MIB)
    assert not any((tmp_path / "mindllm").iterdir())
    assert "belongs to user 12345" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_cache_that_another_user_planted_is_not_used(tmp_path, monkeypatch, caplog):
    """Libraries are loaded from the cache: in a shared place its directory has to be of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mindllm").mkdir()
    os.chown(tmp_path / "mindllm", 12345, 12345)
    assert user_cache() == tmp_path / "mindllm"  # mounted into a container, where users have other numbers
    tmp_path.chmod(0o1777)
    assert user_cache() != tmp_path / "mindllm"
    assert f"{tmp_path / 'mindllm'} belongs to another user" in caplog.text


def test_a_wrong_share_leaves_no_lock(monkeypatch):
    monkeypatch.setenv(subject.VARIABLE, "60%")
    with pytest.raises(UserError):
        MemoryClaim().__enter__()
    monkeypatch.delenv(subject.VARIABLE)
    with subject.claim_directory() as directory:
        lock = os.open(subject.LOCK, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=directory)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)


def test_nobody_learns_a_budget_while_another_chooses(monkeypatch, another):
    monkeypatch.setattr(subject, "available_bytes", lambda: 10 * GIB)
    lines = (
        "from mindllm.jobs.memory import MemoryClaim",
        "print('begun', flush=True)",
        "with MemoryClaim(): print('in', flush=True)",
    )
    code = "\n".join(lines)
    with MemoryClaim() as claim:
        waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.3)
        claim.take(GIB)
        assert waiting.stdout.readline() == "in\n"
        waiting.wait()


def test_a_claim_inside_another_has_the_rest_of_it(monkeypatch):
    monkeypatch.setattr(subject, "available_bytes", lambda: 10 * GIB)
    with MemoryClaim() as outer:
        outer.take(GIB)
        # pages of their own: malloc keeps what earlier tests gave back
        with mmap.mmap(-1, 200 * MIB, flags=mmap.MAP_PRIVATE) as held:
            held.write(bytes([1]) * len(held))
            with MemoryClaim() as inner:
                assert outer.budget - 260 * MIB <= inner.budget <= outer.budget - len(held) + 20 * MIB


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_more_than_the_budget_ends_what_was_started(monkeypatch, handler):
    """Also in a job of the background, where Ctrl-C is ignored."""
    monkeypatch.setattr(subject, "GUARD_SECONDS", 0.05)
    monkeypatch.setattr(subject, "available_bytes", lambda: 100 * MIB)
    code = "import os, time; held = bytearray(os.urandom(1)) * (300 << 20); time.sleep(60)"
    started, said = [], []

    def take_too_much() -> None:
        with MemoryClaim() as claim:
            claim.take(10 * MIB)
            started.append(subprocess.Popen([sys.executable, "-c", code]))
            for _ in range(600):
                said.append(time.sleep(0.1))

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(RunFailed, match=r"more memory was taken than there is for it \(0\.1 GB, 60% of the"):
            take_too_much()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(said) < 600
    assert started[0].wait() == -signal.SIGKILL
