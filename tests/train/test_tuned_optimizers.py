"""GaLore and LISA, step by step beside small references; and what LISA draws."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from mindllm.architecture.optimizer_state import PROJECTION
from mindllm.config.optimizer import OptimizerConfig
from mindllm.config.tuning import PetConfig
from mindllm.train.optimizers.galore import GaLoreAdamW
from mindllm.train.optimizers.lisa import LisaAdamW, drawn_layers

OPTIMIZER = OptimizerConfig(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
RATE, COEFFICIENT = 1e-2, 0.5
SHAPES = {
    "model.tok_embeddings.embedding_weight": (7, 6),
    "model.layers.0.attention.wq.weight": (12, 6),
    "model.layers.0.ffn_norm.weight": (6,),
    "model.layers.1.feed_forward.w2.weight": (6, 10),
    "model.layers.2.attention.wq.weight": (6, 6),
}


class Adam:
    """AdamW of one array, as in the paper."""

    def __init__(self, shape):
        self.m, self.v, self.t = np.zeros(shape), np.zeros(shape), 0

    def direction(self, gradient):
        beta1, beta2 = OPTIMIZER.betas
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        self.v = beta2 * self.v + (1 - beta2) * gradient**2
        return self.m / (1 - beta1**self.t) / (np.sqrt(self.v / (1 - beta2**self.t)) + OPTIMIZER.eps)


def decayed(weight, direction):
    decay = OPTIMIZER.weight_decay if weight.ndim > 1 else 0.0
    return weight - RATE * (direction + decay * weight)


def gradients_of(step):
    """Random ones, matrices with singular values that differ."""
    random = np.random.default_rng(step)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = random.normal(size=shape)
        if len(shape) == 2:
            left, values, right = np.linalg.svd(found[name], full_matrices=False)
            found[name] = left * 2.0 ** -np.arange(len(values)) @ right
    return {name: value.astype(np.float32) for name, value in found.items()}


def start():
    random = np.random.default_rng(99)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def parameters():
    return [Parameter(Tensor(value), name=name) for name, value in start().items()]


def apply(optimizer, gradients):
    given = tuple(map(Tensor, gradients.values()))
    if optimizer.prepare is not None:
        given = optimizer.prepare(given, Tensor(1.0, ms.float32))
    optimizer(given, Tensor(COEFFICIENT, ms.float32), Tensor(RATE, ms.float32))


def test_galore_is_adamw_of_projected_gradients():
    rank, gap = 2, 2
    pet = PetConfig(pet_type="galore", galore_rank=rank, galore_update_proj_gap=gap, galore_scale=0.7)
    trained = parameters()
    optimizer = GaLoreAdamW(trained, OPTIMIZER, pet)
    wanted, moments, projections = {name: value.astype(np.float64) for name, value in start().items()}, {}, {}
    for step in range(5):
        gradients = gradients_of(step)
        apply(optimizer, gradients)
        state = {item.name: item.asnumpy() for item in optimizer.get_parameters()}
        for name, weight in wanted.items():
            gradient = COEFFICIENT * gradients[name].astype(np.float64)
            if f"{PROJECTION}.{name}" not in state:
                wanted[name] = decayed(weight, moments.setdefault(name, Adam(weight.shape)).direction(gradient))
                continue
            tall, found = weight.shape[0] >= weight.shape[1], state[f"{PROJECTION}.{name}"]
            if step % gap == 0:
                left, _, right = np.linalg.svd(gradient)
                vectors, ours = (right[:rank].T, found.T) if tall else (left[:, :rank], found)
                signs = np.sign(np.sum(vectors * ours, axis=0))  # which sign a vector has is no matter of the method
                projections[name] = vectors * signs
            vectors = projections[name]
            np.testing.assert_allclose(found.T if tall else found, vectors, atol=1e-4, err_msg=name)
            low = gradient @ vectors if tall else vectors.T @ gradient
            direction = moments.setdefault(name, Adam(low.shape)).direction(low)
            assert state[f"adam_m.{name}"].shape == low.shape
            back = direction @ vectors.T if tall else vectors @ direction
            wanted[name] = decayed(weight, 0.7 * back)
    for item in trained:
        np.testing.assert_allclose(item.asnumpy(), wanted[item.name], atol=2e-4, err_msg=item.name)


def test_lisa_is_adamw_of_the_layers_that_are_drawn():
    layers, active, length, seed = 3, 1, 2, 5
    pet = PetConfig(pet_type="lisa", lisa_activated_layers=active, lisa_step_interval=length)
    trained = parameters()
    optimizer = LisaAdamW(trained, OPTIMIZER, pet, layers, seed)
    wanted, moments = {name: value.astype(np.float64) for name, value in start().items()}, {}
    moved = set()
    for step in range(7):
        gradients = gradients_of(step)
        apply(optimizer, gradients)
        drawn = drawn_layers(seed, step // length, layers, active)
        for name, weight in wanted.items():
            layer = int(name.split(".")[2]) if ".layers." in name else -1
            if layer >= 0 and step % length == 0:
                moments.pop(name, None)
            if layer >= 0 and not drawn[layer]:
                continue
            moved.add(layer)
            gradient = COEFFICIENT * gradients[name].astype(np.float64)
            wanted[name] = decayed(weight, moments.setdefault(name, Adam(weight.shape)).direction(gradient))
        for item in trained:
            np.testing.assert_allclose(item.asnumpy(), wanted[item.name], atol=1e-5, err_msg=f"{item.name} {step}")
    assert len(moved) > 2


@pytest.mark.parametrize("active", [1, 3, 8])
def test_layers_are_drawn_by_seed_and_interval(active):
    draws = np.array([drawn_layers(1, interval, 8, active) for interval in range(400)])
    assert (draws.sum(axis=1) == active).all()
    np.testing.assert_allclose(draws.mean(axis=0), active / 8, atol=0.08)
    assert np.array_equal(draws[7], drawn_layers(1, 7, 8, active))
    assert active == 8 or not np.array_equal(draws, [drawn_layers(2, interval, 8, active) for interval in range(400)])
