"""Networks of MindFormers, by the keys their public YAMLs have, are families of ours of the published size."""

from pathlib import Path

import pytest

from mindllm.config import load_config
from mindllm.families import family_of
from mindllm.mindformers.recomputation import OPERATORS
from tests.mindformers.mindformers_files import LEGACY, MCORE, writer

TINY = Path(__file__).parents[2] / "configs" / "llama2" / "pretrain_llama2_tiny.yaml"
LLAMA3_8B = {
    "num_layers": 32,
    "num_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "theta": 500000,
}
YI_6B = {"n_kv_heads": 4, "vocab_size": 64000, "intermediate_size": 11008, "theta": 5000000.0}
QWEN_7B = {
    "type": "QwenConfig",
    "auto_register": "qwen_config.QwenConfig",
    "seq_length": 8192,
    "vocab_size": 151936,
    "intermediate_size": 11008,
    "emb_dropout_prob": 0.0,
    "rotary_pct": 1.0,
    "rotary_emb_base": 10000,
    "kv_channels": 128,
}
QWEN1_5_7B = {
    "vocab_size": 151936,
    "intermediate_size": 11008,
    "qkv_has_bias": True,
    "theta": 1000000.0,
    "max_position_embedding": 32768,
    "rotary_dtype": "float16",
    "fine_grain_interleave": 2,
    "compute_in_2d": True,
}
INTERNLM_7B = {"type": "InternLMConfig", "vocab_size": 103168, "has_bias": True}
BAICHUAN2_7B = {"vocab_size": 125696}
BAICHUAN2_13B = {
    "hidden_size": 5120,
    "num_layers": 40,
    "num_heads": 40,
    "vocab_size": 125696,
    "multiple_of": 128,
    "softmax_compute_type": "float16",
}
GLM3_6B = {
    "type": "ChatGLM2Config",
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "layernorm_epsilon": 1.0e-5,
    "rope_ratio": 1,
    "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "bias_dropout_fusion": True,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "apply_query_key_layer_scaling": True,
    "attention_softmax_in_fp32": True,
    "fp32_residual_connection": False,
    "quantization_bit": 0,
    "pre_seq_len": "None",
    "prefix_projection": False,
    "param_init_type": "bfloat16",
    "compute_dtype": "bfloat16",
    "layernorm_compute_type": "float32",
    "use_flash_attention": True,
    "eos_token_id": [2],
    "pad_token_id": 0,
}
BLOOM_7B1 = {
    "type": "BloomConfig",
    "vocab_size": 250880,
    "num_layers": 30,
    "expand_ratio": 4,
    "hidden_act": "gelu",
    "hidden_dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
    "initializer_range": 0.02,
    "embedding_init_type": "float32",
    "multiple_of": ...,
}
GPT2 = {
    "type": "GPT2Config",
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "seq_length": 1024,
    "expand_ratio": 4,
    "hidden_act": "fast_gelu",
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "pad_token_id": 50256,
    "multiple_of": ...,
}
PUBLISHED = [
    ("LlamaForCausalLM", LLAMA3_8B, "llama", 8030261248),
    ("LlamaForCausalLM", YI_6B, "llama", 6061035520),
    ("LlamaForCausalLM", QWEN1_5_7B, "qwen2", 7721324544),
    ("QwenForCausalLM", QWEN_7B, "qwen", 7721324544),
    ("InternLMForCausalLM", INTERNLM_7B, "internlm", 7321948160),
    ("Baichuan7BV2ForCausalLM", BAICHUAN2_7B, "baichuan", 7505973248),
    ("Baichuan13BV2ForCausalLM", BAICHUAN2_13B, "baichuan", 13896668160),
    ("BloomLMHeadModel", BLOOM_7B1, "bloom", 7069016064),
    ("GPT2LMHeadModel", GPT2, "gpt2", 124439808),
]


@pytest.mark.parametrize(
    ("network", "keys", "family", "parameters"), PUBLISHED, ids=[row[0] + row[2] for row in PUBLISHED]
)
def test_a_network_is_the_published_model(tmp_path, network, keys, family, parameters):
    changes = {f"model.model_config.{key}": value for key, value in keys.items()}
    config = load_config(writer(tmp_path)(LEGACY, {**changes, "model.arch.type": network}))
    model = config.model.config
    assert model.parameter_count() == parameters
    assert family_of(model).name == family


def test_chatglm3_has_its_own_keys_alone(tmp_path):
    tree = {**LEGACY, "model": {"model_config": GLM3_6B, "arch": {"type": "ChatGLM2ForConditionalGeneration"}}}
    model = load_config(writer(tmp_path)(tree)).model.config
    assert model.parameter_count() == 6243584000
    assert (model.partial_rotary_factor, model.n_kv_heads, model.eos_token_ids) == (0.5, 2, (2,))
    assert family_of(model).name == "chatglm"


def test_qwen3_of_mcore_names(tmp_path):
    keys = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "qk_layernorm": True,
        "head_dim": 128,
        "attention_bias": False,
    }
    changes = {f"model.model_config.{key}": value for key, value in keys.items()}
    model = load_config(writer(tmp_path)(MCORE, changes)).model.config
    assert model.qk_layernorm
    assert family_of(model).name == "qwen3"


def test_the_operators_of_a_layer_are_those_that_patterns_are_looked_up_in():
    from mindllm.models import build_model
    from mindllm.parallel.operators import operators

    config = load_config(TINY)
    model = build_model(config.model.config, "Ascend")
    layer = next(cell for _, cell in model.cells_and_names() if type(cell).__name__ == "DecoderLayer")
    assert set(OPERATORS) <= set(operators(layer))


@pytest.mark.parametrize(
    ("network", "keys", "targets", "adapted"),
    [
        ("GPT2LMHeadModel", GPT2, ".*dense1.*|.*dense3.*", {"attention.wq", "attention.wv"}),
        ("ChatGLM2ForConditionalGeneration", GLM3_6B, ".*query_key_value*", {f"attention.w{name}" for name in "qkv"}),
        ("LlamaForCausalLM", LLAMA3_8B, ".*wq|.*wv", {"attention.wq", "attention.wv"}),
    ],
)
def test_adapters_stand_beside_the_projections_that_are_meant(tmp_path, network, keys, targets, adapted):
    pet = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": targets}
    model = {key: value for key, value in keys.items() if value is not ...}
    tree = {**LEGACY, "model": {"model_config": {**model, "pet_config": pet}, "arch": {"type": network}}}
    config = load_config(writer(tmp_path)(tree))
    assert {adapter.module for adapter in config.model.config.architecture.layers[0].adapters} == adapted
