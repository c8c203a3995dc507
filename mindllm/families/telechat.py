"""TeleChat 1 and 2 (Wang et al., 2024): Llama with a bias on what attention and feed-forward return, and key and value in one
matrix, head by head; TeleChat 3: Llama in files of another name.

Beyond ``base_seqlen`` the published code stretches its rotations and sharpens the scores: not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.errors import UserError, shortened
from mindllm.families.family import REQUIRED, Content, Family, given_or
from mindllm.families.llama import llama_like
from mindllm.families.weight_table import (
    EMBEDDING,
    HEAD,
    OUR_LAYER,
    Weight,
    WeightTable,
    in_layers,
    renamed,
    with_biases,
)

CONTEXT = 8192
LAYER = (
    *renamed(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "attention.wq.weight": "self_attention.query.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "feed_forward.w1.weight": "mlp.gate_proj.weight",
            "feed_forward.w3.weight": "mlp.up_proj.weight",
        }
    ),
    Weight("self_attention.key_value.weight", ("attention.wk.weight", "attention.wv.weight"), by_head=True),
    *with_biases("self_attention.dense", ("attention.wo",)),
    *with_biases("mlp.down_proj", ("feed_forward.w2",)),
)
OUTSIDE = {
    EMBEDDING: "transformer.word_embeddings.weight",
    "model.norm_out.weight": "transformer.ln_f.weight",
    HEAD: HEAD,
}


def _read(path: Path, content: Content) -> dict[str, Any]:
    trained = given_or(content, "training_seqlen", CONTEXT)
    unstretched = given_or(content, "base_seqlen", trained)
    if trained != unstretched:
        message = (
            f"must be base_seqlen {shortened(unstretched)}, or rotations are stretched (value {shortened(trained)})"
        )
        raise UserError(f"{path}: training_seqlen: {message}")
    return {}


def _write(model: ModelConfig) -> Content:
    return {"training_seqlen": model.max_position_embedding, "base_seqlen": model.max_position_embedding}


TELECHAT = Family(
    name="telechat",
    network="TelechatForCausalLM",
    keys={
        "vocab_size": ("vocab_size", REQUIRED),
        "hidden_size": ("hidden_size", REQUIRED),
        "num_layers": ("n_layer", REQUIRED),
        "num_heads": ("n_head", REQUIRED),
        "n_kv_heads": ("num_key_value_heads", None),
        "intermediate_size": ("ffn_hidden_size", REQUIRED),
        "max_position_embedding": ("seq_length", CONTEXT),
        "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "initializer_range": ("initializer_range", 0.02),
        "attention_dropout": ("attention_dropout", 0.0),
        "hidden_dropout": ("hidden_dropout", 0.0),
    },
    weights=WeightTable(
        (*renamed(OUTSIDE), *in_layers(OUR_LAYER, "transformer.h.{layer}", LAYER)),
        prefix="transformer.",
        computed=("rotary_emb.inv_freq",),
    ),
    fixed={"attn_proj_has_bias": True, "mlp_proj_has_bias": True},
    only={"apply_residual_connection_post_layernorm": (False,), "embed_layernorm": (False,)},
    written={"apply_residual_connection_post_layernorm": False, "embed_layernorm": False},
    read=_read,
    write=_write,
)
TELECHAT3 = llama_like(
    "telechat3",
    "TeleChat3ForCausalLM",
    only={"attention_bias": (False,)},
    written={"attention_bias": False, "mlp_bias": False},
)
FAMILIES = (TELECHAT, TELECHAT3)
