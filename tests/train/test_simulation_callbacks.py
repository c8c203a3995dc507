"""A simulated rank saves what it keeps, unless that is large."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from mindllm.train.callbacks import checkpoint
from mindllm.train.callbacks.checkpoint import SimulatedCheckpointMonitor
from mindllm.train.checkpoint import CheckpointStore, Part, RankTensors


@pytest.fixture
def state(monkeypatch):
    part = Part((8, 4), (slice(4, 8), slice(0, 4)), np.zeros((4, 4), np.float32), 1)
    held = {3: RankTensors({"weight": part}, {"adam_m.weight": part})}
    engine = SimpleNamespace(local_state=lambda: held, ranks=SimpleNamespace(rank=3))
    monkeypatch.setattr("mindllm.train.callbacks.checkpoint.run_state", lambda state: {"step": 1, "simulated": True})
    return SimpleNamespace(engine=engine, step=1, failures=[], results={})


@pytest.mark.parametrize(("most", "saved"), [(1 << 20, True), (127, False)])
def test_a_large_part_is_told_and_not_written(most, saved, state, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "MAX_CHECKPOINT_BYTES", most)
    store = CheckpointStore(tmp_path / "checkpoint", remove_redundancy=False)
    monitor = SimulatedCheckpointMonitor(store, 1)
    with caplog.at_level(logging.INFO):
        monitor.end(state)
    assert (store.newest() is not None) == saved
    assert ("it is not written in a simulation" in caplog.text) != saved
    assert state.failures == []
