"""A ``config.json`` of an unknown model: which family is nearest, and what of the file that family would not take."""

import json

import pytest

from mindllm.config import read_model_config
from mindllm.errors import UserError

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {
    **SIZES,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "head_dim": 8,
}


def refusal(tmp_path, **content):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "torch_dtype": "bfloat16", **content}))
    with pytest.raises(UserError) as caught:
        read_model_config(tmp_path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"model_type": "phi9", **LLAMA},
            "; nearest is llama, which knows every key of this file, though it may compute",
        ),
        (
            {"model_type": "phi9", **LLAMA, "logit_scale": 0.5},
            "; nearest is llama, which does not know logit_scale 0.5",
        ),
        ({"model_type": "phi9", **LLAMA, "attention_bias": True, "mlp_bias": True}, "does not compute mlp_bias True"),
        (
            {
                "model_type": "odd",
                "vocab_size": 96,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                "alibi": True,
            },
            "; nearest is gpt2, which does not know alibi True",
        ),
        (
            {"model_type": "moe", **LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 7.0},
            "; nearest is mixtral, which does not know swiglu_limit 7.0",
        ),
    ],
)
def test_the_nearest_family_and_what_differs_are_told(content, said, tmp_path):
    refused = refusal(tmp_path, **content)
    assert f"model_type: this model is not supported (value {content['model_type']}); supported: llama" in refused
    assert said in refused


def test_many_keys_and_long_values_are_bounded(tmp_path):
    odd = {f"odd_{number}": "x" * 500 for number in range(50)}
    assert len(refusal(tmp_path, model_type="phi9", **LLAMA, **odd)) < 1500


@pytest.mark.parametrize(
    "content", [{}, {"d_model": 512, "d_ff": 2048}, {"hidden_size": {"a": [1]}}, {"rope_scaling": 7, **SIZES}]
)
def test_a_file_that_is_near_none_is_still_one_line(content, tmp_path):
    refused = refusal(tmp_path, model_type="t5", **content)
    assert "\n" not in refused
    assert ("; nearest is" in refused) == (SIZES.keys() <= content.keys())
