"""Latent attention in generation: the cache has the narrow vectors alone, and logits are those of the form of training."""

import numpy as np
import pytest
from mindspore import Tensor
from tiny import VOCABULARY, FullForward, tiny_config, tiny_model

from mindllm.architecture.parts import LatentAttentionSpec
from mindllm.config import ModelConfig
from mindllm.generate.graphs import cache as graph_cache
from mindllm.generate.graphs.layer_cache import CacheForm
from mindllm.generate.session import PrefixSession, Session
from mindllm.models import Kernels

LENGTH, PROMPT = 24, 20
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
SPARSE = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}


def latent_config(**changes):
    return tiny_config(LENGTH, head_dim=None, intermediate_size=48, **{**LATENT, **changes})


@pytest.fixture(scope="module")
def model():
    config = latent_config(q_lora_rank=12, **SPARSE)
    return config, tiny_model(config)


def texts(count):
    return np.random.default_rng(3).integers(0, VOCABULARY, (count, LENGTH)).astype(np.int32)


def logits_of(model, rows):
    forward = FullForward(model)
    forward.set_train(False)
    return forward(Tensor(rows)).asnumpy()


@pytest.mark.parametrize("tokens_for_keys", [2, graph_cache.NEVER])
def test_logits_are_those_of_the_whole_text(model, monkeypatch, tokens_for_keys):
    """Prompts of two lengths in pieces of 16, then a token at a time; prefilled in either form."""
    config, lm = model
    monkeypatch.setattr(graph_cache, "tokens_for_keys", lambda spec: tokens_for_keys)
    monkeypatch.setattr("mindllm.generate.prompts.WIDEST", 16)
    rows, lengths = texts(2), np.array([PROMPT, PROMPT - 9])
    session = Session(lm, config, Kernels.choose(config, "CPU"), 2, LENGTH)
    wanted = logits_of(lm, rows)
    found = session.prefill([row[:length] for row, length in zip(rows, lengths, strict=True)])
    np.testing.assert_allclose(found, wanted[[0, 1], lengths - 1], rtol=1e-4, atol=1e-4)
    for step in range(LENGTH - PROMPT):
        places = lengths + step
        found = session.decode(rows[[0, 1], places], places)
        np.testing.assert_allclose(found, wanted[[0, 1], places], rtol=1e-4, atol=1e-4)


def test_sequences_are_shared_and_change_places(model):
    config, lm = model
    rows = texts(2)
    rows[1, : PROMPT - 2] = rows[0, : PROMPT - 2]
    wanted = logits_of(lm, rows)
    session = PrefixSession(lm, config, Kernels.choose(config, "CPU"), 2, LENGTH)
    np.testing.assert_allclose(session.prefill(list(rows[:, :PROMPT])), wanted[:, PROMPT - 1], rtol=1e-4, atol=1e-4)
    session.reorder(np.array([1, 0]))
    found = session.decode(rows[[1, 0], PROMPT], [PROMPT, PROMPT])
    np.testing.assert_allclose(found, wanted[[1, 0], PROMPT], rtol=1e-4, atol=1e-4)


def test_a_token_takes_the_narrow_vector_and_one_turned_key(model):
    config, lm = model
    session = Session(lm, config, Kernels.choose(config, "CPU"), 2, LENGTH)
    caches = [layer.cache for layer in session._decoder.layers]
    assert {cache.form.numbers for cache in caches} == {16 + 4}
    assert sum(item.size for cache in caches for item in cache.get_parameters()) == 2 * 2 * session.capacity * 20


def test_the_published_sizes():
    """DeepSeek-V3: 576 numbers a token and layer; keys are made for pieces of a prompt, not for a token."""
    spec = deepseek_v3()
    assert CacheForm.of(spec).numbers == 576
    assert graph_cache.tokens_for_keys(spec) == 158


def deepseek_v3() -> LatentAttentionSpec:
    sizes = {"vocab_size": 97, "hidden_size": 7168, "num_layers": 1, "num_heads": 128, "intermediate_size": 64}
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    spec = ModelConfig(**sizes, **latent, seq_length=LENGTH).architecture.layers[0].attention
    assert isinstance(spec, LatentAttentionSpec)
    return spec
