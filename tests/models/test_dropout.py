"""Dropout: how much is dropped, of what nothing else depends, and that a model without random keys drops nothing."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

from mindllm.config import ModelConfig
from mindllm.models import CausalLM, Kernels
from mindllm.models.attention.attention import CausalAttention, ComposedAttention
from mindllm.models.dropout import AttentionDropout, Dropout, Keys
from mindllm.models.weights import initialise, trained_weights
from mindllm.random_keys import random_keys
from mindllm.train.step import ForwardBackward

SIZES = {"vocab_size": 53, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "seq_length": 8}
RATES = {"embedding_dropout": 0.1, "attention_dropout": 0.2, "hidden_dropout": 0.3}


def keys_of(samples, length, seed=1):
    return Tensor(np.stack([random_keys(seed, sample, length) for sample in range(samples)]))


def masks(rate=0.3, width=128, salt=3):
    return Dropout(rate, width, salt)(Tensor(np.ones((512, width), np.float32)), keys_of(8, 64)).asnumpy()


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
def test_the_asked_share_is_dropped_and_the_mean_is_kept(rate):
    y = masks(rate)
    deviation = np.sqrt(rate * (1 - rate) / y.size)
    assert abs((y == 0).mean() - rate) < 5 * deviation
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)


def correlations(mask):
    found = np.corrcoef(mask)
    return found[~np.eye(len(found), dtype=bool)]


def test_tokens_and_channels_are_dropped_independently():
    kept = (masks() != 0).astype(float)
    for mask in (kept, kept.T):
        found = correlations(mask)
        spread = mask.shape[1] ** -0.5  # of correlations of independent bits
        assert abs(found.mean()) < 0.1 * spread
        assert 0.9 * spread < found.std() < 1.1 * spread


def test_parts_of_a_model_drop_independently():
    kept = [(masks(salt=salt) != 0).ravel().astype(float) for salt in (2, 3)]
    assert abs(np.corrcoef(kept)[0, 1]) < 5 * kept[0].size ** -0.5
    keys = keys_of(8, 64)
    layers = [Keys(number)(keys, keys) for number in (0, 1)]
    y = [(Dropout(0.3, 128, 3)(Tensor(np.ones((512, 128), np.float32)), key).asnumpy() != 0).ravel() for key in layers]
    assert abs(np.corrcoef(np.stack(y).astype(float))[0, 1]) < 5 * y[0].size ** -0.5


def test_heads_queries_and_keys_are_dropped_independently():
    dropout = AttentionDropout(0.2, 4, 64, salt=1)
    y = dropout(Tensor(np.ones((4, 4, 64, 64), np.float32)), keys_of(4, 64), dropout.columns).asnumpy()
    kept = (y != 0).astype(float)
    assert abs(kept.mean() - 0.8) < 0.01
    for axis in (1, 2, 3):
        mask = np.moveaxis(kept, axis, 0).reshape(kept.shape[axis], -1)
        assert np.abs(correlations(mask)).max() < 6 * mask.shape[1] ** -0.5


def model_of(**fields):
    config = ModelConfig(**SIZES, **fields)
    model = CausalLM(config, Kernels.choose(config, "CPU"))
    weights = trained_weights(model)
    initialise(weights, seed=3)
    return model, ForwardBackward(model, ParameterTuple(list(weights.values())))


def results(step, random=None):
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, SIZES["seq_length"] + 1)).astype(np.int32)
    batch = (tokens[:, :-1], tokens[:, 1:], np.ones((2, SIZES["seq_length"]), np.float32))
    further = () if random is None else (None, None, random)
    loss, _, gradients = step(*map(Tensor, batch), Tensor(1.0, ms.float32), *further)
    return [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]


def test_without_keys_nothing_is_dropped_and_with_them_always_the_same():
    _, dropping = model_of(**RATES)
    _, plain = model_of()
    for mine, theirs in zip(results(dropping), results(plain), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    keys = keys_of(2, SIZES["seq_length"])
    once, again, other = (results(dropping, key) for key in (keys, keys, keys_of(2, SIZES["seq_length"], seed=2)))
    assert all(map(np.array_equal, once, again))
    assert once[0] != other[0] != results(plain)[0]


def test_blocks_of_queries_drop_what_the_whole_does():
    config = ModelConfig(**{**SIZES, "seq_length": 256}, attention_dropout=0.2)
    kernels, spec = Kernels.choose(config, "CPU"), config.architecture.layers[0].attention
    random = np.random.default_rng(0)
    query, key, value = (Tensor(random.normal(size=(1, 2, 256, 8)).astype(np.float32)) for _ in range(3))
    mask = Tensor(np.where(np.triu(np.ones((256, 256), bool), 1), -1e9, 0).astype(np.float32))
    outputs = [
        core(spec, kernels, 256)(query, key, value, mask, None, keys_of(1, 256)).asnumpy()
        for core in (CausalAttention, ComposedAttention)
    ]
    np.testing.assert_allclose(*outputs, atol=1e-6)
