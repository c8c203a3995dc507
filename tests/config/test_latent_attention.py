"""Latent attention as values: what keys describe and count, and which combinations are refused before anything is compiled."""

import math

import pytest
from small_models import SIZES

from mindllm.architecture.parts import scalars
from mindllm.config import ModelConfig, load_config
from mindllm.errors import UserError

LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


def model(**changes):
    return ModelConfig(**{**SIZES, **LATENT, **changes})


def test_weights_are_those_of_the_narrow_vectors():
    attention = model().architecture.layers[0].attention
    assert attention.head_dim == model().head_dim == 20
    hidden, heads = 32, 4
    down = 24 * hidden + (16 + 8) * hidden
    up = heads * 20 * 24 + heads * (12 + 10) * 16
    assert scalars(attention.matrices()) == down + up + heads * 10 * hidden
    assert scalars(attention.weights()) == scalars(attention.matrices()) + 24 + 16
    assert "wq_plain.weight" in model(q_lora_rank=None).architecture.layers[0].attention.weights()


def test_scores_and_tables_are_sharpened_as_yarn_says():
    yarn = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    attention = model(rope_scaling=yarn).architecture.layers[0].attention
    whole, half = 0.1 * math.log(40) + 1, 0.05 * math.log(40) + 1
    assert attention.scale == pytest.approx(half**2 / math.sqrt(20))
    assert attention.position.scaling.magnitude == pytest.approx(whole / half)
    assert model().architecture.layers[0].attention.scale == 1 / math.sqrt(20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, r"q_lora_rank: is a key of latent attention \(value 24\); write kv_lora_rank, too"),
        ({"qkv_has_bias": True}, r"qkv_has_bias: latent attention has none"),
        ({"sliding_window": 8}, r"sliding_window: latent attention has none"),
        ({"position_embedding_type": "alibi"}, r"position_embedding_type: latent attention turns qk_rope_head_dim"),
        ({"n_kv_heads": 2}, r"n_kv_heads: every head of latent attention has its own keys \(value 2\); write 4"),
        ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim: must be even"),
        ({"v_head_dim": 21}, r"v_head_dim: must be at most 20"),
        ({"head_dim": 8}, r"head_dim: must be qk_nope_head_dim \+ qk_rope_head_dim 20 \(value 8\); leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused(minimal, write, changes, message):
    minimal["model"]["model_config"] = {**SIZES, **LATENT, **changes}
    with pytest.raises(UserError, match=message):
        load_config(write(minimal))
