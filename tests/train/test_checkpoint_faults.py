"""Damaged checkpoints are refused by the name of the file and the previous good one is offered; full disks harm nothing."""

import errno
import json
import os
import resource
import shutil
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindllm.errors import UserError
from mindllm.train.checkpoint import (
    CheckpointNotSavedError,
    CheckpointStore,
    DamagedCheckpointError,
    RankTensors,
    load_checkpoint,
)
from mindllm.train.checkpoint import tensors as tensors_module

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
WEIGHTS = {"w": np.arange(500, dtype=np.float32), "b": np.arange(3, dtype=np.int64)}


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoint")
    for step in (10, 20, 30):
        store.save(step, {0: RankTensors(WEIGHTS, {"adam_m.w": WEIGHTS["w"]})}, {"step": step})
    return store


def assert_refused(store, *words, offered="llm-20", newest="llm-30"):
    good = store.directory / offered
    with pytest.raises(DamagedCheckpointError) as error:
        store.resume(str(store.newest()))
    message = str(error.value)
    assert message.startswith(str(store.directory / newest))
    assert message.endswith(f"resume with --resume_training={good}")
    for word in words:
        assert word in message
    assert store.latest_good() == good
    assert store.resume(True).path == good
    assert store.resume(True).weights["w"][7] == 7


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, 7, 0.5, -1])
def test_a_truncated_file(store, name, keep):
    path = store.newest() / name
    size = path.stat().st_size
    os.truncate(path, int(size * keep) if isinstance(keep, float) else keep % size)
    assert_refused(store, name, "truncated")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(store, name):
    (store.newest() / name).unlink()
    assert_refused(store, name, "is missing")


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_more_at_its_end(store, name):
    with open(store.newest() / name, "ab") as file:
        file.write(b"more")
    assert_refused(store, name)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere(store, name, place, bit):
    path = store.newest() / name
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[int(place * len(whole))] ^= 1 << bit
    path.write_bytes(broken)
    try:
        with pytest.raises(DamagedCheckpointError, match=name):
            store.resume(str(store.newest()))
    finally:
        path.write_bytes(whole)


def test_a_file_of_another_checkpoint(store):
    shutil.copy(store.directory / "llm-20" / "state.json", store.newest())
    assert_refused(store, "state.json", "altered")


def test_a_renamed_checkpoint(store):
    (store.directory / "llm-10").rename(store.directory / "llm-99")
    assert_refused(store, "manifest.json is of step 10", newest="llm-99", offered="llm-30")


def test_a_foreign_manifest(store):
    (store.newest() / "manifest.json").write_text('{"weight_map": {}}')
    assert_refused(store, "manifest.json is foreign")


def test_a_directory_of_another_program(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"manifest\.json is missing: the directory is neither a complete checkpoint of mindllm"
    ):
        load_checkpoint(tmp_path)


def test_tensors_that_the_manifest_does_not_list(store):
    shutil.copy(store.newest() / "model.safetensors", store.newest() / "model-00002.safetensors")
    assert_refused(store, "model-00002.safetensors is foreign")


def test_other_unlisted_files_do_no_harm(store):
    (store.newest() / "notes.txt").write_text("the good one")
    assert store.resume(True).step == 30


def test_a_newer_format(store):
    path = store.newest() / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2, "created_by": "mindllm 9.0"}))
    assert_refused(store, "manifest.json is of the newer format 2, written by mindllm 9.0", "install a newer mindllm")


def test_the_offer_skips_damaged_ones_and_says_when_none_is_left(store):
    (store.newest() / "state.json").unlink()
    (store.directory / "llm-20" / "model.safetensors").write_bytes(b"")
    assert_refused(store, "state.json", offered="llm-10")
    shutil.rmtree(store.directory / "llm-10")
    with pytest.raises(UserError, match=r"has no other good checkpoint; start without --load_checkpoint"):
        load_checkpoint(store.newest(), option="--load_checkpoint")
    assert store.latest_good() is None


def assert_not_saved(store, words):
    before = sorted(path.name for path in store.directory.iterdir())
    with pytest.raises(CheckpointNotSavedError, match=words) as error:
        store.save(40, {0: RankTensors({"w": np.zeros(100_000, np.float32)}, {})}, {})
    assert f"the newest checkpoint is {store.directory / 'llm-30'}" in str(error.value)
    assert sorted(path.name for path in store.directory.iterdir()) == before
    assert store.resume(True).step == 30


def assert_can_go_on(store):
    assert load_checkpoint(store.save(40, {0: RankTensors(WEIGHTS, {})}, {})).step == 40


def test_a_file_that_may_not_grow(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        assert_not_saved(store, "llm-40 was not saved: File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_can_go_on(store)


def test_a_disk_known_to_be_too_full_is_not_written_to(store, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(tensors_module.HashingWriter, "write", lambda *_: pytest.fail("written"))
    assert_not_saved(store, "it needs 0.4 MB and 0.0 MB are free")
    monkeypatch.undo()
    assert_can_go_on(store)


@pytest.mark.parametrize("call", range(6))
def test_a_disk_that_is_full_at_any_flush(store, monkeypatch, call):
    calls = iter(range(100))

    def fsync(descriptor):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    if call < 5:  # four files and their directory; from the rename on the checkpoint is visible
        assert_not_saved(store, "No space left on device")
    else:
        with pytest.raises(CheckpointNotSavedError, match="No space left on device"):
            store.save(40, {0: RankTensors(WEIGHTS, {})}, {})
        assert store.resume(True).step in (30, 40)
    monkeypatch.undo()
    assert_can_go_on(store)


def test_an_interrupt_while_saving_leaves_nothing(store, monkeypatch):
    def interrupted(writer, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(tensors_module.HashingWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(40, {0: RankTensors(WEIGHTS, {})}, {})
    assert sorted(path.name for path in store.directory.iterdir()) == ["llm-10", "llm-20", "llm-30"]


def test_a_replacement_that_fails_puts_the_old_one_back(store, monkeypatch):
    rename = type(store.directory).rename

    def failing(path, target):
        if ".saving-" in path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(type(store.directory), "rename", failing)
    with pytest.raises(CheckpointNotSavedError, match="Input/output error"):
        store.save(30, {0: RankTensors({"w": np.zeros(3)}, {})}, {})
    assert store.resume(True).path.name == "llm-30"
    assert store.resume(True).weights["w"][7] == 7


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_stop_training(store, monkeypatch, caplog):
    def refusing(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    store.keep_checkpoint_max = 1
    monkeypatch.setattr(os, "rmdir", refusing)
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None if ignore_errors else refusing(path))
    assert store.save(40, {0: RankTensors(WEIGHTS, {})}, {}).name == "llm-40"
    assert "could not be deleted: [Errno 13] Permission denied" in caplog.text
    monkeypatch.undo()
    store.recover()
    assert [path.name for path in store.directory.iterdir()] == ["llm-40"]
