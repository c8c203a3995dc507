"""What was simulated is found again where a run differs in nothing that its step is compiled from."""

import pytest
from small_cluster import cluster_run

from mindllm.config import override_config
from mindllm.dry_run.simulations import rank_key

SAME = {
    "train_dataset.data_loader.config.data_path": "elsewhere/corpus",
    "lr_schedule.learning_rate": 1e-5,
    "load_checkpoint": "models/other",
    "context.max_device_memory": "32GB",
    "output_dir": "elsewhere",
    "callbacks": [],
}
OTHER = {"runner_config.batch_size": 4, "model.model_config.num_layers": 8, "context.memory_optimize_level": "O1"}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The key of what is stored of a run with one key changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = cluster_run(dp=2)
    return lambda key=None, value=None: rank_key(override_config(config, {key: value} if key else {}), 0, "simulate")


@pytest.mark.parametrize("key", SAME)
def test_other_data_rates_and_limits_are_the_same_simulation(key, kept):
    assert kept(key, SAME[key]) == kept()


@pytest.mark.parametrize("key", OTHER)
def test_another_step_is_another_simulation(key, kept):
    assert kept(key, OTHER[key]) != kept()
