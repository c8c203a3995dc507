"""Mistakes that a single device and a cluster would share, so that the cluster check cannot see them: PyTorch does.

Weights and moments after two clipped steps beside Hugging Face's Llama and ``torch.optim.AdamW``; and that each mistake, planted
into our side, is far beyond what rounding makes.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindllm.config.optimizer import OptimizerConfig
from mindllm.families.llama import WEIGHTS as HUGGING_FACE
from mindllm.models.weights import assign, trained_weights
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.step import TrainStep

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_llama_torch import random_batch, random_model, torch_loss  # noqa: E402

LARGEST_NORM = 0.005  # less than any norm here: every step is clipped
STEPS, RATE = 2, 1e-2
OPTIMIZER = OptimizerConfig(eps=1e-4)  # a small one would turn the sign of gradients next to zero into whole updates
ROUNDING = 2e-4
"""Of the largest magnitude of a tensor."""
Arrays = dict[str, np.ndarray]


class Ours:
    """Our model, trained from the same weights as often as asked; the step is compiled once for each way to build it."""

    def __init__(self) -> None:
        self.model, self.llama = random_model("biased", std=0.02)
        self.initial = {name: item.asnumpy().copy() for name, item in trained_weights(self.model).items()}
        self.tables = {item.name: item for item in self.model.get_parameters() if not item.requires_grad}

    def step(self, largest_norm: float | None = LARGEST_NORM, decays_all: bool = False) -> TrainStep:
        optimizer = AdamW(self.model.trainable_params(), OPTIMIZER)
        if decays_all:
            optimizer.columns = ((max(optimizer.decays, key=float),) * len(optimizer.decays),)
        return TrainStep(self.model, optimizer, largest_norm).set_train()

    def trained(self, step: TrainStep, counts_all: bool = False) -> Arrays:
        """Weights and first moments by name after training from the start."""
        assign(trained_weights(self.model), self.initial)
        optimizer = step.update.optimizer
        for state in (*optimizer.moments1, *optimizer.moments2):
            state.set_data(Tensor(np.zeros(state.shape, np.float32)))
        for power in (optimizer.beta1_power, optimizer.beta2_power):
            power.set_data(Tensor(1.0, ms.float32))
        for count in range(STEPS):
            inputs, labels, mask = random_batch(count)
            mask = np.ones_like(mask) if counts_all else mask
            step(*map(Tensor, (inputs, labels, mask)), Tensor(RATE, ms.float32), Tensor(1.0, ms.float32))
        held = (*trained_weights(self.model).values(), *optimizer.moments1)
        return {item.name: item.asnumpy().copy() for item in held}

    def with_table(self, name: str, change: Callable[[np.ndarray], np.ndarray], step: TrainStep) -> Arrays:
        """As ``trained``, with a table that is wrong meanwhile."""
        table = next(item for key, item in self.tables.items() if key.endswith(name))
        right = table.asnumpy().copy()
        table.set_data(Tensor(change(right)))
        try:
            return self.trained(step)
        finally:
            table.set_data(Tensor(right))


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours()


@pytest.fixture(scope="module")
def good(ours) -> TrainStep:
    return ours.step()


@pytest.fixture(scope="module")
def theirs(ours) -> Arrays:
    """Weights and first moments after the same steps in PyTorch, by our names."""
    llama = ours.llama
    names = {HUGGING_FACE.theirs(name): name for name in ours.initial}
    items = {names[name]: item for name, item in llama.named_parameters()}
    groups = [
        {"params": [item for item in items.values() if item.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [item for item in items.values() if item.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for count in range(STEPS):
        torch_loss(llama, *random_batch(count)).backward()
        assert torch.nn.utils.clip_grad_norm_(llama.parameters(), LARGEST_NORM) > LARGEST_NORM
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: item.detach().numpy() for name, item in items.items()}
    moments = {f"adam_m.{name}": optimizer.state[item]["exp_avg"].numpy() for name, item in items.items()}
    return {**weights, **moments}


def error(found: Arrays, wanted: Arrays) -> float:
    """The largest difference of any tensor, relative to its largest magnitude."""
    return max(float(np.abs(found[name] - array).max() / np.abs(array).max()) for name, array in wanted.items())


def test_weights_and_moments_are_those_of_pytorch(ours, good, theirs):
    assert error(ours.trained(good), theirs) < ROUNDING


def test_no_clipping_is_noticed(ours, theirs):
    assert error(ours.trained(ours.step(largest_norm=None)), theirs) > 100 * ROUNDING


def test_decay_on_norms_and_biases_is_noticed(ours, theirs):
    assert error(ours.trained(ours.step(decays_all=True)), theirs) > 4 * ROUNDING


def test_masked_tokens_that_count_are_noticed(ours, good, theirs):
    assert error(ours.trained(good, counts_all=True), theirs) > 100 * ROUNDING


def test_an_inverted_mask_is_noticed(ours, good, theirs):
    found = ours.with_table("attention_mask", lambda mask: mask.min() - mask, good)
    assert error(found, theirs) > 100 * ROUNDING


def test_other_rotary_angles_are_noticed(ours, good, theirs):
    assert error(ours.with_table("rotary_cos", lambda table: table[::-1].copy(), good), theirs) > 10 * ROUNDING
