"""Muon is the published algorithm: of matrices the momentum with its singular values mapped, of all others AdamW."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindllm import verify
from mindllm.config import load_config, override_config
from mindllm.config.optimizer import OptimizerConfig
from mindllm.errors import UserError
from mindllm.reduced_runs.model import single_device
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.engine import ReplicaEngine
from mindllm.train.optimizers.muon import MuonAdamW
from tests.mindformers.mindformers_files import LEGACY, writer

torch = pytest.importorskip("torch")

NAMES = {
    "model.tok_embeddings.embedding_weight": (9, 4),
    "model.layers.0.tall.weight": (12, 5),
    "model.layers.0.wide.weight": (4, 11),
    "model.layers.1.norm.weight": (4,),
    "lm_head.weight": (9, 4),
}
ORTHOGONAL = (1, 2)
RATE, STEPS = 1e-2, 5
FORM = Path(verify.__file__).parent / "forms" / "orthogonal_updates.yaml"


class Step(nn.Cell):
    """One step of an optimizer."""

    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, rate, *gradients):
        return self.optimizer(gradients, Tensor(1.0, ms.float32), rate)


def trained(config):
    """Weights after some steps on random gradients, with what they began as and the gradients."""
    random = np.random.default_rng(0)
    initial = [random.standard_normal(shape) for shape in NAMES.values()]
    gradients = [[random.standard_normal(shape) for shape in NAMES.values()] for _ in range(STEPS)]
    weights = [Parameter(Tensor(value, ms.float32), name=name) for name, value in zip(NAMES, initial, strict=True)]
    step = Step(MuonAdamW(weights, config))
    for values in gradients:
        step(Tensor(RATE, ms.float32), *(Tensor(value, ms.float32) for value in values))
    return initial, gradients, [item.asnumpy() for item in weights]


def moonlight(weight, gradients, config):
    """``Muon`` of Moonlight (github.com/MoonshotAI/Moonlight, ``examples/toy_train.py``), in float64."""
    momentum = np.zeros_like(weight)
    for gradient in gradients:
        momentum = config.momentum * momentum + gradient
        x = gradient + config.momentum * momentum if config.nesterov else momentum
        turned = x.shape[0] > x.shape[1]
        x = x.T if turned else x
        x = x / (np.linalg.norm(x) + 1e-7)
        for a, b, c in config.newton_schulz:
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        x = x.T if turned else x
        weight = weight * (1 - RATE * config.weight_decay)
        weight = weight - RATE * config.matched_adamw_rms * np.sqrt(max(weight.shape)) * x
    return weight


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "matched_adamw_rms": 0.4, "weight_decay": 0.0},
        {"ns_steps": 4, "ns_coefficients": [[3.4445, -4.775, 2.0315], [3.4445, -4.775, 2.0315], [2.0, -1.5, 0.5]]},
    ],
    ids=["defaults", "plain momentum", "two kinds of steps"],
)
def test_matrices_of_layers_are_updated_as_by_moonlight(options):
    config = OptimizerConfig(type="Muon", **options)
    initial, gradients, found = trained(config)
    for place in ORTHOGONAL:
        expected = moonlight(initial[place], [values[place] for values in gradients], config)
        np.testing.assert_allclose(found[place], expected, atol=2e-5)


def test_matrices_are_near_those_of_pytorch_and_the_others_are_adamw():
    """PyTorch rounds its Newton-Schulz steps to bfloat16."""
    config = OptimizerConfig(type="Muon")
    initial, gradients, found = trained(config)
    theirs = [torch.nn.Parameter(torch.from_numpy(value.copy())) for value in initial]
    matrices = [theirs[place] for place in ORTHOGONAL]
    vectors, tables = [theirs[3]], [theirs[0], theirs[4]]
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    options = {"momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    both = torch.optim.Muon(matrices, lr=RATE, **options), torch.optim.AdamW(groups, lr=RATE, betas=config.betas)
    for values in gradients:
        for parameter, value in zip(theirs, values, strict=True):
            parameter.grad = torch.from_numpy(value)
        for optimizer in both:
            optimizer.step()
    for place, parameter in enumerate(theirs):
        tolerance = 2e-3 if place in ORTHOGONAL else 2e-6
        np.testing.assert_allclose(found[place], parameter.detach().numpy(), atol=tolerance)
        assert np.max(np.abs(found[place] - initial[place])) > 1e-2


def small():
    """The form's model on one device."""
    return override_config(single_device(load_config(FORM)), {"model.model_config.compute_dtype": "float32"})


def batch(seed, config):
    """Rows of random tokens."""
    shape = (config.global_batch_size, config.model.config.seq_length + 1)
    tokens = np.random.default_rng(seed).integers(0, 128, shape).astype(np.int32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones_like(tokens[:, 1:], np.float32)}


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    config = small()
    engine = ReplicaEngine(config)
    engine.step(batch(0, config), 1e-2, 1.0)
    state = engine.local_state()
    path = CheckpointStore(tmp_path, keep_checkpoint_max=1).save(1, state, {"step": 1})
    losses = [engine.step(batch(seed, config), 1e-2, 1.0).loss for seed in (1, 2)]
    resumed = ReplicaEngine(config)
    resumed.load(load_checkpoint(path))
    assert [resumed.step(batch(seed, config), 1e-2, 1.0).loss for seed in (1, 2)] == losses
    kept = set(load_checkpoint(path).optimizer)
    assert "muon_m.model.layers.0.attention.wq.weight" in kept
    assert "adam_v.model.layers.0.attention.wq.weight" not in kept
    assert "adam_v.lm_head.weight" in kept


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.type": "AdamW", "optimizer.momentum": 0.9}, "is a key of type Muon"),
        ({"optimizer.ns_steps": 1, "optimizer.ns_coefficients": [[1, 2, 3], [2, 3, 4]]}, "2 entries for 1 steps"),
        ({"model.model_config.pet_config": {"pet_type": "lisa"}}, "pet_type lisa has its own update"),
    ],
)
def test_what_muon_cannot_do_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        override_config(small(), changes)


def test_muon_of_mindformers_is_read(tmp_path):
    theirs = {
        "type": "Muon",
        "adamw_betas": [0.9, 0.95],
        "momentum": 0.9,
        "qk_clip_enabled": False,
        "weight_decay": 0.1,
    }
    config = load_config(writer(tmp_path)(LEGACY, {"optimizer": theirs})).optimizer
    assert (config.type, config.betas, config.momentum, config.eps) == ("Muon", (0.9, 0.95), 0.9, 1e-8)
