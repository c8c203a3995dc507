"""What tuning draws: dropout of adapters and noise on embeddings, by the keys of tokens, and neither without them."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

from mindllm.config import ModelConfig
from mindllm.families import with_file_names
from mindllm.finetune.transform import build_tuned_model
from mindllm.models.dropout import EmbeddingNoise
from mindllm.models.weights import initialise, model_weights, trained_weights
from mindllm.random_keys import random_keys
from mindllm.train.step import ForwardBackward

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_length": 16}
DRAWS = {"lora_dropout": 0.2, "neftune_noise_alpha": 5.0}


def keys_of(samples, seed=1, length=16):
    return Tensor(np.stack([random_keys(seed, sample, length) for sample in range(samples)]))


def test_noise_is_uniform_within_its_strength():
    width, length = 64, 16
    x = Tensor(np.ones((32 * length, width), np.float32))
    noise = EmbeddingNoise(5.0, length, width, salt=5)(x, keys_of(32)).asnumpy() - 1
    strength = 5.0 / np.sqrt(length * width)
    assert np.abs(noise).max() <= strength + 1e-6
    assert noise.mean() == pytest.approx(0, abs=0.02 * strength)
    assert noise.std() == pytest.approx(strength / np.sqrt(3), rel=0.02)


def tuned(**pet):
    config = with_file_names(ModelConfig.model_validate({**SIZES, "pet_config": {"lora_rank": 4, **pet}}))
    model = build_tuned_model(config)
    initialise(model_weights(model), seed=3)
    for name, weight in trained_weights(model).items():
        if name.endswith("lora_b"):  # zeros, beside which nothing that is dropped would be seen
            weight.set_data(Tensor(np.random.default_rng(7).normal(0, 0.1, weight.shape).astype(np.float32)))
    return config, model


def losses(model, *keys):
    step = ForwardBackward(model, ParameterTuple(list(trained_weights(model).values())))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 17)).astype(np.int32)
    batch = tuple(map(Tensor, (tokens[:, :-1], tokens[:, 1:], np.ones((2, 16), np.float32))))
    further = [() if key is None else (None, None, key) for key in keys]
    return [float(step(*batch, Tensor(1.0, ms.float32), *more)[0].asnumpy()) for more in further]


@pytest.mark.parametrize("pet", [DRAWS, {"lora_dropout": 0.2}, {"neftune_noise_alpha": 5.0}], ids=str)
def test_a_step_draws_by_its_keys_and_an_evaluation_does_not(pet):
    config, model = tuned(**pet)
    assert config.architecture.drops
    first, again, other, evaluated = losses(model, keys_of(2), keys_of(2), keys_of(2, seed=2), None)
    assert first == again
    assert len({first, other, evaluated}) == 3
    assert evaluated == losses(tuned()[1], None)[0]


def test_parameters_of_a_tuned_model_have_names_of_their_own():
    """A graph from the compile cache finds its parameters by name: equal ones would all be the last of them."""
    config, model = tuned(**DRAWS, use_dora=True)
    names = [parameter.name for parameter in model.get_parameters()]
    assert len(names) == len(set(names))
    assert model_weights(model).keys() == config.architecture.weight_shapes().keys()
