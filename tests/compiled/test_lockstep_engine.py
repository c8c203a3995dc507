"""All ranks as one engine: they train and evaluate as one device does, and hand their state on to other layouts."""

import numpy as np
import pytest
from small_cluster import cluster_run

from mindllm.compiled.execute.engine import LockstepEngine
from mindllm.config import override_config
from mindllm.reduced_runs.model import single_device
from mindllm.train.checkpoint.parts import join_ranks
from mindllm.train.engine import ReplicaEngine

MODEL = {"compute_dtype": "float32"}
STABLE = {"eps": 1e-4}  # gradients next to zero, whose sign is a matter of rounding, are no whole updates
ON_CPU = {"context": {"device_target": "CPU"}, "model": MODEL, "optimizer": STABLE}
OPTIMIZER = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
STAGES = cluster_run(tp=2, pp=2, micro=2, use_seq_parallel=True, **ON_CPU)
SLICES = override_config(
    cluster_run(dp=2, parallel={**OPTIMIZER, "full_batch": False}, **ON_CPU), {"runner_config.batch_size": 2}
)


def batch(config, seed):
    random = np.random.default_rng(seed)
    shape = (config.global_batch_size, config.model.config.seq_length)
    tokens = random.integers(0, config.model.config.vocab_size, (2, *shape)).astype(np.int32)
    mask = (random.random(shape) < random.uniform(0.3, 1.0, (shape[0], 1))).astype(np.float32)
    return {"input_ids": tokens[0], "labels": tokens[1], "loss_mask": mask}


def weights(engine):
    return {
        name: np.asarray(tensor)
        for name, tensor in join_ranks(t.weights for t in engine.local_state().values()).items()
    }


def assert_equal_weights(first, second):
    for name, weight in weights(first).items():
        np.testing.assert_allclose(weights(second)[name], weight, atol=2e-6, err_msg=name)


def assert_same_step(first, second, columns, scale=1.0):
    one, other = (engine.step(columns, 1e-3, scale) for engine in (first, second))
    assert other.loss == pytest.approx(one.loss, rel=1e-5)
    assert other.global_norm == pytest.approx(one.global_norm, rel=1e-5)
    assert (other.tokens, other.overflow) == (one.tokens, one.overflow)


@pytest.fixture(scope="module", params=[STAGES, SLICES], ids=["stages", "slices"])
def engines(request, graph_cache):
    """All ranks, and one device; both from their initial weights, which are the same."""
    config = request.param
    return LockstepEngine(config, cache=graph_cache), ReplicaEngine(single_device(config))


def test_they_begin_and_train_as_one_device_does(engines):
    cluster, single = engines
    for name, weight in weights(single).items():
        assert np.array_equal(weights(cluster)[name], weight), name
    for seed in range(2):
        assert_same_step(single, cluster, batch(cluster.config, seed))
    assert_equal_weights(single, cluster)


def test_they_evaluate_with_the_weights_they_have(engines):
    cluster, single = engines
    for seed in (10, 11):
        columns = batch(cluster.config, seed)
        loss, tokens = cluster.evaluate(columns)
        assert (loss, tokens) == (pytest.approx(single.evaluate(columns)[0], rel=1e-5), single.evaluate(columns)[1])
        assert_same_step(single, cluster, columns)


def test_state_goes_on_under_another_layout(engines):
    """From all ranks to one device and back: weights, moments and powers."""
    cluster, single = engines
    state = {
        name: np.asarray(tensor)
        for tensors in zip(*((t.weights, t.optimizer) for t in cluster.local_state().values()), strict=True)
        for name, tensor in join_ranks(tensors).items()
    }
    single.load_state(state)
    assert_same_step(single, cluster, batch(cluster.config, 20))
    back = join_ranks(t.weights for t in single.local_state().values())
    cluster.load_state({name: np.asarray(tensor) for name, tensor in back.items()})
    assert_equal_weights(single, cluster)


def test_what_is_not_finite_is_named(engines):
    cluster, _ = engines
    columns = batch(cluster.config, 30)
    assert cluster.not_finite(columns) == []
    name = "model.layers.1.feed_forward.w1.weight"
    before = {name: weights(cluster)[name]}
    cluster.load_state({name: np.full_like(before[name], 3e38)})
    assert cluster.step(columns, 1e-3, 1.0).overflow
    (found,) = cluster.not_finite(columns)
    assert found.startswith("MatMul at ")
    assert "feed_forward" in found
    assert "on rank" in found
    cluster.load_state({name: np.full_like(before[name], np.nan)})
    assert cluster.not_finite(columns) == [f"weight {name}"]
    cluster.load_state(before)
