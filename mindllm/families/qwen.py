"""Qwen 1 (Bai et al., 2023): Llama with a bias on query, key and value, which are one matrix.

``intermediate_size`` counts both halves of the gated feed-forward, and its second matrix is the gate. What its code does beyond
``seq_length`` only (other rotary bases, queries scaled by their position) is not computed: ``seq_length`` is the longest context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.errors import UserError, shortened
from mindllm.families.family import REQUIRED, Content, Family
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
    *renamed(
        {
            "attention_norm.weight": "ln_1.weight",
            "ffn_norm.weight": "ln_2.weight",
            "attention.wo.weight": "attn.c_proj.weight",
            "feed_forward.w1.weight": "mlp.w2.weight",
            "feed_forward.w3.weight": "mlp.w1.weight",
            "feed_forward.w2.weight": "mlp.c_proj.weight",
        }
    ),
    *with_biases("attn.c_attn", QUERY_KEY_VALUE),
)
OUTSIDE = {EMBEDDING: "transformer.wte.weight", "model.norm_out.weight": "transformer.ln_f.weight", HEAD: HEAD}


def _read(path: Path, content: Content) -> dict[str, Any]:
    both = content.get("intermediate_size")
    if not isinstance(both, int) or both % 2:
        raise UserError(f"{path}: intermediate_size: must be an even number, twice the width (value {shortened(both)})")
    return {"intermediate_size": both // 2}


def _write(model: ModelConfig) -> Content:
    return {
        "intermediate_size": 2 * model.intermediate_size,
        "max_position_embeddings": model.max_position_embedding,
    }


FAMILY = Family(
    name="qwen",
    network="QWenLMHeadModel",
    keys={
        "vocab_size": ("vocab_size", REQUIRED),
        "hidden_size": ("hidden_size", REQUIRED),
        "num_layers": ("num_hidden_layers", REQUIRED),
        "num_heads": ("num_attention_heads", REQUIRED),
        "head_dim": ("kv_channels", 128),
        "max_position_embedding": ("seq_length", 2048),
        "rms_norm_eps": ("layer_norm_epsilon", 1e-6),
        "theta": ("rotary_emb_base", 10000.0),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        "initializer_range": ("initializer_range", 0.02),
        "embedding_dropout": ("emb_dropout_prob", 0.0),
        "attention_dropout": ("attn_dropout_prob", 0.0),
    },
    weights=WeightTable(
        (*renamed(OUTSIDE), *in_layers(OUR_LAYER, "transformer.h.{layer}", LAYER)),
        computed=("rotary_emb.inv_freq",),
    ),
    fixed={"qkv_has_bias": True},
    only={"no_bias": (True,), "rotary_pct": (1,)},
    written={"no_bias": True, "rotary_pct": 1.0, "use_dynamic_ntk": True, "use_logn_attn": True},
    read=_read,
    write=_write,
)
