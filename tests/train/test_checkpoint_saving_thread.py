"""Checkpoints written beside training: of the values when they were saved, one after the other, failures told."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mindllm.train.checkpoint import (
    CheckpointNotSavedError,
    CheckpointStore,
    Part,
    RankTensors,
    SavingThread,
    load_checkpoint,
)
from mindllm.train.checkpoint import store as store_module


@pytest.fixture
def gate(monkeypatch):
    """Holds every file back until it is opened."""
    opened, write = threading.Event(), store_module.write_file

    def waiting(path, role, writer):
        assert opened.wait(30)
        return write(path, role, writer)

    monkeypatch.setattr(store_module, "write_file", waiting)
    return opened


def held(array):
    part = Part(array.shape, (slice(0, 4),), array)
    return {0: RankTensors({"w": array}, {"m": part})}


def test_values_are_those_of_the_step_whatever_training_does_meanwhile(tmp_path, gate):
    thread, values = SavingThread(CheckpointStore(tmp_path)), np.ones(4, np.float32)
    assert thread.save(1, held(values), {}) is None
    values += 1
    assert thread.poll() is None
    assert not (tmp_path / "llm-1").exists()
    gate.set()
    saved = thread.finish()
    assert (saved.step, saved.path) == (1, tmp_path / "llm-1")
    assert saved.blocked > 0
    assert saved.written > 0
    checkpoint = load_checkpoint(saved.path)
    assert np.array_equal(checkpoint.weights["w"], np.ones(4))
    assert np.array_equal(checkpoint.optimizer["m"], np.ones(4))


def test_the_next_one_waits_for_the_last(tmp_path):
    thread, values = SavingThread(CheckpointStore(tmp_path)), np.ones(4, np.float32)
    thread.save(1, held(values), {})
    assert thread.save(2, held(values), {}).step == 1
    assert thread.finish().step == 2
    assert thread.finish() is None
    thread.close()


def test_a_failure_surfaces_at_the_next_call_and_the_one_after_is_good(tmp_path, monkeypatch):
    thread, values = SavingThread(CheckpointStore(tmp_path)), np.ones(4, np.float32)

    def full(path, role, writer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "write_file", full)
    thread.save(1, held(values), {})
    with pytest.raises(CheckpointNotSavedError, match="llm-1 was not saved"):
        thread.finish()
    monkeypatch.undo()
    assert thread.save(2, held(values), {}) is None
    assert thread.finish().step == 2
