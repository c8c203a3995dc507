"""What a step counted of experts: biases move towards the mean, metrics and the log tell the loads, checkpoints hold none."""

import json
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from small_cluster import cluster_run

from mindllm.config import OptimizerConfig
from mindllm.models import build_model
from mindllm.models.weights import trained_weights
from mindllm.train.callbacks.figures import load_line
from mindllm.train.callbacks.metrics import MetricsMonitor, load_scalars
from mindllm.train.expert_loads import LayerLoad, layer_loads
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.state import StepRecord

LAYER = "model.layers.3.feed_forward"
EXPERTS = {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2}
LOADS = (LayerLoad(3, (0.5, 0.25, 1.0, 0.25), 0.125),)


def parameter(name, value):
    return Parameter(Tensor(np.array(value, np.float32)), name=name)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_bias_grows_where_tokens_are_missing_and_stays_at_the_mean(rate):
    weights = [
        parameter("weight", np.ones((2, 2))),
        parameter(f"{LAYER}.router.bias", [1, 1, 1, 1]),
        parameter(f"{LAYER}.load.probe", [0, 0, 0, 0, 0]),
    ]
    optimizer = AdamW(weights, OptimizerConfig(), rate)
    counted = np.array([8, 2, 5, 5 + 1e-4, 3], np.float32)
    gradients = tuple(Tensor(values) for values in (np.ones((2, 2), np.float32), np.zeros(4, np.float32), counted))
    optimizer(gradients, Tensor(0.5, ms.float32), Tensor(0.1, ms.float32))
    np.testing.assert_allclose(weights[1].asnumpy(), [1 - rate, 1 + rate, 1, 1])
    assert not weights[2].asnumpy().any(), "the counter itself stays zero"
    (kept,) = optimizer.expert_loads.counted
    np.testing.assert_allclose(kept.asnumpy(), counted * 0.5)
    assert [item.name for item in weights] == ["weight", f"{LAYER}.router.bias", f"{LAYER}.load.probe"]
    assert kept.name == f"load.{LAYER}.load.probe"
    assert optimizer.updated == (0, 1), "the norm of the gradients has no counters in it"


def test_counters_are_no_weights():
    config = cluster_run(use_parallel=False, model=EXPERTS).model.config
    model = build_model(config)
    assert set(trained_weights(model)) == set(config.architecture.weight_shapes())
    probes = {item.name for item in model.trainable_params()} - set(trained_weights(model))
    assert probes == {f"model.layers.{number}.feed_forward.load.probe" for number in range(2)}


def test_counts_are_told_by_layer_whatever_they_are_scaled_by():
    elsewhere = {"load.model.layers.9.feed_forward.load.probe": np.zeros(5)}
    counted = {f"load.{LAYER}.load.probe": np.array([2, 1, 4, 1, 1]) * 1e-3, **elsewhere}
    (load,) = layer_loads(counted, chosen=2)
    assert load.layer == 3
    assert load.shares == pytest.approx((0.5, 0.25, 1.0, 0.25))
    assert load.dropped == pytest.approx(0.125)
    assert (load.largest, load.smallest) == pytest.approx((2.0, 0.5))
    assert load.tokens(64) == (32, 16, 64, 16)


def test_the_log_and_the_dashboard_name_the_busiest_and_what_was_dropped():
    assert load_line(LOADS) == (
        "{ experts: largest load 2.00 of the mean (layer 3), smallest 0.50 (layer 3), dropped choices: 12.50% }"
    )
    assert load_scalars(LOADS) == {
        "expert_load/layer_3": 2.0,
        "expert_dropped/layer_3": 0.125,
        "max_violation/layer_3": 1.0,
        "max_violation": 1.0,
    }
    assert load_scalars(()) == {}
    assert load_scalars(()) == {}


def test_metrics_have_the_tokens_of_every_expert_every_so_many_steps(tmp_path):
    config = cluster_run(use_parallel=False, model=EXPERTS)
    seen = {"expert_loads": LOADS, "preference": {}, "mtp_loss": None, "health": {}}
    state = SimpleNamespace(output_dir=tmp_path, step=0, scores={}, against_proof={}, config=config, **seen)
    monitor = MetricsMonitor(expert_load_steps=2)
    monitor.begin(state)
    for step in (1, 2):
        monitor.step_end(state, StepRecord(step, 1, 2.0, 0.1, 1.0, False, 1.0, 64, 1.0, 8.0, 8.0, 1.0, 0.0, 0.0))
        state.mtp_loss = 3.5
    monitor.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "experts" not in first
    assert ("mtp_loss" in first, second["mtp_loss"]) == (False, 3.5)
    assert second["experts"] == [{"layer": 3, "tokens": [32, 16, 64, 16], "dropped": 16, "max_violation": 1.0}]
