"""What the host computes with the kernels alone is what the compiled graphs compute, and needs no MindSpore."""

import subprocess
import sys

import numpy as np
import pytest
from mindspore import Tensor
from tiny import SHAPES, options, tiny_config, tiny_model

from mindllm.generate.generator import Generator
from mindllm.generate.graphs.library import library
from mindllm.generate.host import PIECE, HostModel, HostSession
from mindllm.models.weights import model_weights

PROMPTS = [[5, 17, 3, 60, 22], [11], list(range(2 * PIECE + 3)), [5, 17, 3, 60, 22]]
FAMILIES = {
    **SHAPES,
    "biases, half of the heads turned": {"qkv_has_bias": True, "attn_proj_has_bias": True, "partial_rotary_factor": 0.5},
    "as Gemma 1, norms of heads": {
        "layernorm_zero_centered_gamma": True, "hidden_act": "gelu_tanh", "scale_embeddings": True, "qk_layernorm": True,
        "query_pre_attn_scalar": 7.0,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    if library() is None:
        pytest.skip("there is no g++")


def both(**changes):
    """The same model as cells and on the host."""
    config = tiny_config(seq_length=128, **changes)
    model, random = tiny_model(config), np.random.default_rng(1)
    for weight in model.trainable_params():  # biases and norms that are 0 and 1 would show nothing
        if weight.ndim == 1:
            weight.set_data(Tensor(weight.asnumpy() + random.normal(0, 0.3, weight.shape).astype(np.float32)))
    assert HostModel.can_compute(config, config.seq_length)
    arrays = {name: item.asnumpy().copy() for name, item in model_weights(model).items()}
    return config, model, HostModel(config, arrays)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_says_what_the_graphs_say(family):
    config, model, host = both(**FAMILIES[family])
    graphs, alone = Generator(model, config, native=False), Generator(host, config)
    wanted = graphs.generate(PROMPTS, options(20, output_logprobs=True))
    found = alone.generate(PROMPTS, options(20, output_logprobs=True))
    assert [item.tokens for item in found] == [item.tokens for item in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-3, atol=2e-3)


def test_beams_and_draws_are_those_of_the_graphs():
    config, model, host = both(n_kv_heads=2)
    for keys in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        wanted = Generator(model, config, native=False).generate(PROMPTS, options(9, **keys), seed=3)
        found = Generator(host, config).generate(PROMPTS, options(9, **keys), seed=3)
        assert [item.tokens for item in found] == [item.tokens for item in wanted]


def test_a_prompt_in_pieces_has_the_logits_of_one_that_grew():
    _, _, host = both(n_kv_heads=2)
    prompt = list(range(PIECE + 5))
    whole, grown = HostSession(host, 1, 128), HostSession(host, 1, 128)
    logits = grown.prefill([prompt[:1]])
    for position in range(1, len(prompt)):
        logits = grown.decode([prompt[position]], [position])
    np.testing.assert_array_equal(whole.prefill([prompt]), logits)


def test_a_position_outside_of_the_cache_is_refused():
    _, _, host = both()
    with pytest.raises(IndexError, match="out of bounds"):
        HostSession(host, 1, 128).decode([1], [128])


@pytest.mark.parametrize(
    "fields",
    [{"compute_dtype": "bfloat16"}, {"gated_linear_unit": False}, {"position_embedding_type": "alibi"}],
    ids=lambda fields: next(iter(fields)),
)
def test_other_models_are_left_to_the_graphs(fields):
    assert not HostModel.can_compute(tiny_config(**fields), 64)


def test_without_kernels_the_graphs_compute(monkeypatch):
    monkeypatch.setattr("mindllm.generate.host.library", lambda: None)
    assert not HostModel.can_compute(tiny_config(), 64)


def test_prediction_and_chat_do_not_import_mindspore():
    program = "import sys; sys.modules['mindspore'] = None; import mindllm.cli.generate, mindllm.cli.generation"
    subprocess.run([sys.executable, "-c", program], check=True)
