"""What a checkpoint of a tuned run holds is all that its next step depends on."""

from __future__ import annotations

import numpy as np
import pytest
from tuned_runs import batch, snapshot, tuned_run

from mindllm.train.engine import ReplicaEngine

TUNERS = {
    "adalora": {"pet_type": "adalora", "adalora_init_r": 4, "adalora_target_r": 2},
    "galore": {"pet_type": "galore", "galore_rank": 4, "galore_update_proj_gap": 3},
    "lisa": {"pet_type": "lisa", "lisa_activated_layers": 1, "lisa_step_interval": 3},
    "adapter": {"pet_type": "bottleneck", "adapter_length": 4},
    "llamapro": {"pet_type": "llamapro", "num_new_blocks": 2},
}


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_run_goes_on_from_a_snapshot_bit_for_bit(tuner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tuned_run(TUNERS[tuner])
    engine, losses = ReplicaEngine(config), []
    for number in range(5):
        if number == 2:
            saved = snapshot(engine)
        losses.append(engine.step(batch(number), 1e-2, 1.0).loss)
    resumed = ReplicaEngine(config)
    resumed.load_state(saved)
    assert [resumed.step(batch(number), 1e-2, 1.0).loss for number in range(2, 5)] == losses[2:]
    wanted, found = snapshot(engine), snapshot(resumed)
    assert wanted.keys() == found.keys() == saved.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
