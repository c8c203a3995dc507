"""Bloom (Scao et al., 2022): ALiBi, LayerNorm (on the embeddings too), a plain GELU feed-forward, biases everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.families.family import REQUIRED, Content, Family, given_or
from mindllm.families.weight_table import (
    EMBEDDING,
    HEAD,
    OUR_LAYER,
    QUERY_KEY_VALUE,
    WeightTable,
    in_layers,
    renamed,
    with_biases,
)

LAYER = (
    *with_biases("input_layernorm", ("attention_norm",)),
    *with_biases("post_attention_layernorm", ("ffn_norm",)),
    *with_biases("self_attention.query_key_value", QUERY_KEY_VALUE, by_head=True),
    *with_biases("self_attention.dense", ("attention.wo",)),
    *with_biases("mlp.dense_h_to_4h", ("feed_forward.w1",)),
    *with_biases("mlp.dense_4h_to_h", ("feed_forward.w2",)),
)
OUTSIDE = (
    *renamed({EMBEDDING: "transformer.word_embeddings.weight", HEAD: HEAD}),
    *with_biases("transformer.word_embeddings_layernorm", ("model.embedding_norm",)),
    *with_biases("transformer.ln_f", ("model.norm_out",)),
)
LAYERS, HEADS, WIDTH = ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"), ("hidden_size", "n_embed")
LONGEST = 2048  # files say no longest context, or say it as seq_length


def _read(path: Path, content: Content) -> dict[str, Any]:
    hidden = next((content[key] for key in WIDTH if content.get(key) is not None), 64)
    return {
        "hidden_size": hidden,
        "num_layers": next((content[key] for key in LAYERS if content.get(key) is not None), 2),
        "num_heads": next((content[key] for key in HEADS if content.get(key) is not None), 8),
        "intermediate_size": 4 * hidden if isinstance(hidden, int) else hidden,
        "max_position_embedding": given_or(content, "seq_length", LONGEST),
    }


def _write(model: ModelConfig) -> Content:
    return {
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "seq_length": model.max_position_embedding,
    }


FAMILY = Family(
    name="bloom",
    network="BloomForCausalLM",
    keys={
        "vocab_size": ("vocab_size", REQUIRED),
        "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "initializer_range": ("initializer_range", 0.02),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    weights=WeightTable(
        (*OUTSIDE, *in_layers(OUR_LAYER, "transformer.h.{layer}", LAYER)),
        prefix="transformer.",
    ),
    fixed={
        "position_embedding_type": "alibi",
        "normalization": "LayerNorm",
        "embedding_norm": True,
        "hidden_act": "gelu_tanh",
        "gated_linear_unit": False,
        "mlp_has_bias": True,
        "qkv_has_bias": True,
        "attn_proj_has_bias": True,
    },
    only={"apply_residual_connection_post_layernorm": (False,)},
    written={"apply_residual_connection_post_layernorm": False},
    read=_read,
    write=_write,
)
