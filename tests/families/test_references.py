"""The references are what they say: against transformers' decoders that compute the same, and by each trap of their families."""

import json

import pytest
import torch
from references import REFERENCES, chatglm, llama_names, parts, random_tiny
from safetensors.torch import load_file
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 97
LIKE_LLAMA = ["baichuan-7b", "internlm", "aquila", "aquila-grouped", "internlm2", "telechat3"]


def llama_of(reference, names):
    """transformers' Llama with the weights that ``names`` maps to its own."""
    config = reference.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            **{key: config[key] for key in llama_names.TINY if key in config and key != "torch_dtype"},
            max_position_embeddings=config["max_position_embeddings"],
            num_key_value_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
            attention_bias=config.get("bias", False),
            rope_parameters={"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)},
        )
    )
    llama.load_state_dict(names(reference))
    return llama.eval()


def as_llama(reference):
    """Its tensors under Llama's names, in one piece each."""
    tensors = {}
    config, head = reference.config, 8
    for name, tensor in reference.state_dict().items():
        if name.endswith("inv_freq"):
            continue
        if name.endswith("W_pack.weight"):
            pieces = zip("qkv", tensor.chunk(3), strict=True)
        elif name.endswith("wqkv.weight"):
            grouped = tensor.unflatten(0, (config["num_key_value_heads"], -1, head))
            pieces = zip("qkv", (grouped[:, :-2], grouped[:, -2], grouped[:, -1]), strict=True)
        else:
            tensors[renamed(name)] = tensor
            continue
        stem = name.rsplit(".", 2)[0].replace("attention", "self_attn").replace("self_self", "self")
        tensors |= {f"{stem}.{letter}_proj.weight": piece.reshape(-1, tensor.shape[1]) for letter, piece in pieces}
    return tensors


def renamed(name):
    pairs = {
        "tok_embeddings": "embed_tokens",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "output.weight": "lm_head.weight",
    }
    for theirs, ours in pairs.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("family", LIKE_LLAMA)
@torch.no_grad()
def test_the_mathematics_is_llamas_under_other_names(family):
    reference = random_tiny(family)
    torch.testing.assert_close(reference(TOKENS), llama_of(reference, as_llama)(TOKENS).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["chatglm3", "chatglm3-32k"])
@torch.no_grad()
def test_chatglm_is_transformers_glm_with_half_of_each_head_rotated_in_pairs(family):
    reference = random_tiny(family)
    config = chatglm.TINY
    glm = GlmForCausalLM(
        GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["multi_query_group_num"],
            head_dim=config["kv_channels"],
            rms_norm_eps=config["layernorm_epsilon"],
            attention_bias=True,
            tie_word_embeddings=False,
            pad_token_id=0,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0 * reference.config.get("rope_ratio", 1),
                "partial_rotary_factor": 0.5,
            },
        )
    ).eval()
    theirs = {}
    for name, tensor in reference.state_dict().items():
        name = name.replace("transformer.encoder.", "model.").replace("self_attention.dense", "self_attn.o_proj")
        name = name.replace("mlp.dense_h_to_4h", "mlp.gate_up_proj").replace("mlp.dense_4h_to_h", "mlp.down_proj")
        name = name.replace("model.final_layernorm", "model.norm").replace("transformer.output_layer", "lm_head")
        name = name.replace("transformer.embedding.word_embeddings", "model.embed_tokens")
        if "query_key_value" in name:
            for letter, piece in zip("qkv", tensor.split((64, 32, 32)), strict=True):
                theirs[name.replace("self_attention.query_key_value", f"self_attn.{letter}_proj")] = piece
        elif not name.endswith("inv_freq"):
            theirs[name] = tensor
    glm.load_state_dict(theirs)
    torch.testing.assert_close(reference(TOKENS), glm(TOKENS).logits, atol=2e-5, rtol=1e-5)


def test_qwens_gate_is_its_second_matrix():
    mlp = random_tiny("qwen").transformer.h[0].mlp
    hidden = torch.linspace(-1, 1, 32).expand(3, 32)
    before = mlp(hidden)
    with torch.no_grad():
        mlp.w1.weight *= 2
    torch.testing.assert_close(mlp(hidden), 2 * before)  # the product is linear in what is not gated
    with torch.no_grad():
        mlp.w2.weight *= 2
    assert not torch.allclose(mlp(hidden), 4 * before, atol=1e-3)


def test_qwens_intermediate_size_counts_both_halves():
    model = random_tiny("qwen")
    assert model.transformer.h[0].mlp.w1.weight.shape == (48, 32)
    assert model.transformer.h[0].mlp.c_proj.bias is None
    assert model.transformer.h[0].attn.c_attn.bias.shape == (96,)


def test_qwen_beyond_its_sequence_is_refused():
    with pytest.raises(ValueError, match="seq_length 64"):
        random_tiny("qwen")(torch.zeros(1, 65, dtype=torch.long))


def test_chatglm_turns_neighbours_of_the_first_half_of_a_head_only():
    attention = random_tiny("chatglm3").transformer.encoder.layers[0].self_attention
    states = torch.zeros(1, 1, 2, 16)
    states[..., 0] = states[..., 8] = 1.0
    second = attention._rotate(states)[0, 0, 1]
    expected = torch.zeros(16)
    expected[0], expected[1], expected[8] = torch.cos(torch.tensor(1.0)), torch.sin(torch.tensor(1.0)), 1.0
    torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("heads", [4, 8, 40, 112])
def test_alibi_slopes_are_blooms_for_any_number_of_heads(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(parts.alibi_slopes(heads), theirs)


def test_alibi_lowers_the_scores_of_distant_keys_by_the_slope_of_the_head():
    zeros, value = torch.zeros(1, 5, 4, 8), torch.eye(4, 8).expand(1, 5, 4, 8)
    weights = parts.causal_attention(zeros, zeros, value, parts.alibi(5, 4)).unflatten(-1, (5, 8))[0, 3, :, :4]
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1])  # of 4 heads, and the first of 8
    torch.testing.assert_close(weights, torch.softmax(-slopes[:, None] * torch.tensor([3.0, 2, 1, 0]), dim=-1))


@pytest.mark.parametrize("family", ["baichuan2-7b", "baichuan2-13b"])
def test_the_length_of_a_row_of_norm_head_does_not_matter(family):
    model = random_tiny(family)
    before = model(TOKENS)
    with torch.no_grad():
        model.lm_head.weight *= torch.linspace(0.5, 3, 97)[:, None]
    torch.testing.assert_close(model(TOKENS), before)
    model(TOKENS).square().sum().backward()
    radial = (model.lm_head.weight.grad * model.lm_head.weight).sum(1)  # no gradient along the row
    torch.testing.assert_close(radial, torch.zeros(97), atol=1e-2, rtol=0)


def test_which_baichuan_it_is_stands_in_its_config():
    seen = {
        family: (llama_names.has_alibi(config), llama_names.has_norm_head(config))
        for family in llama_names.FAMILIES
        if (config := random_tiny(family).config)["model_type"] == "baichuan"
    }
    assert seen == {
        "baichuan-7b": (False, False),
        "baichuan-13b": (True, False),
        "baichuan2-7b": (False, True),
        "baichuan2-13b": (True, True),
    }
    assert llama_names.has_norm_head({"model_type": "baichuan", "vocab_size": 125_696})


def test_internlm_has_four_biases_of_attention_and_no_other():
    names = [name for name in random_tiny("internlm").state_dict() if name.endswith("bias") and ".0." in name]
    assert names == [f"model.layers.0.self_attn.{letter}_proj.bias" for letter in "qkvo"]


def test_telechat_has_two_biases_and_no_other():
    names = [name for name in random_tiny("telechat").state_dict() if name.endswith("bias") and ".0." in name]
    assert names == ["transformer.h.0.self_attention.dense.bias", "transformer.h.0.mlp.down_proj.bias"]


@pytest.mark.parametrize("family", REFERENCES)
@torch.no_grad()
def test_a_later_token_changes_nothing_before_it(family):
    model = random_tiny(family)
    changed = TOKENS.clone()
    changed[:, 8] = 96
    first, second = model(TOKENS), model(changed)
    torch.testing.assert_close(first[:, :8], second[:, :8])
    assert not torch.allclose(first[:, 8:], second[:, 8:])


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("family", REFERENCES)
def test_a_directory_holds_the_model(tmp_path, family, files):
    model = random_tiny(family)
    model.save(tmp_path, files=files)
    assert json.loads((tmp_path / "config.json").read_text()) == model.config
    tensors = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        tensors |= load_file(path)
    again = type(model)(model.config)
    again.load_state_dict(tensors)
    assert torch.equal(again(TOKENS), model(TOKENS))
    if files > 1:
        places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert set(places) == set(tensors)


def test_pickled_weights_are_those_of_the_safetensors(tmp_path):
    random_tiny("qwen").save(tmp_path, files=2, pickled=True)
    tensors = {}
    for path in sorted(tmp_path.glob("*.bin")):
        tensors |= torch.load(path, weights_only=True)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in random_tiny("qwen").state_dict().items())


def test_greedy_continuation_is_deterministic_and_gradients_reach_every_weight():
    model = random_tiny("chatglm3")
    assert torch.equal(model.greedy(TOKENS, 4), random_tiny("chatglm3").greedy(TOKENS, 4))
    model(TOKENS).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
