"""Muon of routed experts: each one's matrices are updated as if they were alone, whatever is stacked beside them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor
from mindspore import dtype as ms

from mindllm import verify
from mindllm.architecture.optimizer_state import is_orthogonalised
from mindllm.config import load_config, override_config
from mindllm.config.optimizer import OptimizerConfig
from mindllm.config.reading.shipped import shipped_configs
from mindllm.reduced_runs.model import single_device
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.engine import ReplicaEngine
from mindllm.train.optimizers.muon import MuonAdamW
from tests.train.test_muon import RATE, Step, batch, moonlight

STACK, ROUTER, BIAS = (f"model.layers.0.feed_forward.{name}" for name in ("experts.w1.weight", "router.weight", "bias"))
FORM = Path(verify.__file__).parent / "forms" / "muon_experts_over_stages.yaml"
STEPS = 3


def trained(shape, config, scales=1.0, seed=0):
    """A stack, a router and a vector after some steps on random gradients, with what they began as and the gradients."""
    random = np.random.default_rng(seed)
    shapes = {STACK: shape, ROUTER: (shape[0], shape[2]), BIAS: (shape[0],)}
    initial = [random.standard_normal(one) for one in shapes.values()]
    gradients = [[random.standard_normal(one) for one in shapes.values()] for _ in range(STEPS)]
    for values in gradients:
        values[0] *= scales
    weights = [Parameter(Tensor(value, ms.float32), name=name) for name, value in zip(shapes, initial, strict=True)]
    step = Step(MuonAdamW(weights, config))
    for values in gradients:
        step(Tensor(RATE, ms.float32), *(Tensor(value, ms.float32) for value in values))
    return initial, gradients, [item.asnumpy() for item in weights]


sides = st.integers(1, 9)


@settings(max_examples=6)
@given(shape=st.tuples(st.integers(1, 4), sides, sides), nesterov=st.booleans(), seed=st.integers(0, 99))
def test_each_expert_is_updated_as_by_moonlight(shape, nesterov, seed):
    """In float64, one expert after the other. Gradients of one are a thousand times those of the others: norms are its own."""
    config = OptimizerConfig(type="Muon", nesterov=nesterov)
    scales = np.where(np.arange(shape[0]) == seed % shape[0], 1e3, 1.0).reshape(-1, 1, 1)
    initial, gradients, found = trained(shape, config, scales, seed)
    for expert in range(shape[0]):
        own = [values[0][expert] for values in gradients]
        np.testing.assert_allclose(found[0][expert], moonlight(initial[0][expert], own, config), atol=5e-5)
    np.testing.assert_allclose(found[1], moonlight(initial[1], [v[1] for v in gradients], config), atol=5e-5)


def test_a_stack_is_not_one_matrix():
    """What orthogonalising all experts' rows together would give is far away."""
    config = OptimizerConfig(type="Muon")
    initial, gradients, found = trained((3, 6, 8), config)
    rows = [values[0].reshape(18, 8) for values in gradients]
    together = moonlight(initial[0].reshape(18, 8), rows, config).reshape(3, 6, 8)
    assert np.max(np.abs(found[0] - together)) > 1e-3


@pytest.mark.parametrize("name", ["deepseek_v3_671b", "qwen2_moe_57b", "mixtral_8x7b", "llama2_7b"])
def test_whatever_has_three_dimensions_is_of_experts(name):
    """What Muon takes for stacks of matrices is one."""
    (path,) = shipped_configs().rglob(f"pretrain_{name}.yaml")
    shapes = load_config(path).model.config.architecture.trained_shapes()
    stacks = {name for name, shape in shapes.items() if len(shape) == 3 and is_orthogonalised(name, shape)}
    assert all(".feed_forward.experts." in name for name in stacks)
    assert not any(len(shape) > 3 for shape in shapes.values())


def small():
    """The form's model on one device, of a layer and one that predicts ahead."""
    changes = {
        "model.model_config.num_layers": 1,
        "model.model_config.offset": 0,
        "model.model_config.compute_dtype": "float32",
        "model.model_config.aux_loss_types": ["global"],
    }
    return override_config(single_device(load_config(FORM)), changes)


def test_a_resumed_run_with_experts_repeats_the_uninterrupted_one(tmp_path):
    """Momenta of stacks, biases that balance experts and their shares of choices stand in checkpoints."""
    config = small()
    engine = ReplicaEngine(config)
    engine.step(batch(0, config), 1e-2, 1.0)
    assert all(np.any(value) for value in engine.counts().values())
    assert len(engine.counts()) == 3  # experts of two layers, and the loss of what predicts ahead
    path = CheckpointStore(tmp_path, keep_checkpoint_max=1).save(1, engine.local_state(), {"step": 1})
    kept = load_checkpoint(path)
    losses = [engine.step(batch(seed, config), 1e-2, 1.0).loss for seed in (1, 2)]
    engine.load(
        load_checkpoint(path)
    )  # nothing of the steps since may be left; compiling another takes ten times as long
    assert [engine.step(batch(seed, config), 1e-2, 1.0).loss for seed in (1, 2)] == losses
    experts = "model.layers.0.feed_forward.experts.w2.weight"
    assert f"muon_m.{experts}" in kept.optimizer
    assert f"adam_m.{experts}" not in kept.optimizer
    assert "muon_m.model.layers.0.feed_forward.router.weight" in kept.optimizer
    assert np.any(kept.weights["model.layers.0.feed_forward.router.bias"])
    (shares,) = [
        value for name, value in kept.optimizer.items() if name.endswith("layers.0.feed_forward.router.balance.shares")
    ]
    assert np.ptp(shares) > 0
