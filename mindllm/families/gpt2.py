"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, GELU, biases everywhere; matrices are stored ``[in, out]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.architecture.parts import Activation
from mindllm.config.model import ModelConfig
from mindllm.families.family import REQUIRED, Content, Family, given_or
from mindllm.families.weight_table import (
    EMBEDDING,
    HEAD,
    OUR_LAYER,
    POSITIONS,
    QUERY_KEY_VALUE,
    WeightTable,
    in_layers,
    renamed,
    with_biases,
)

LAYER = (
    *with_biases("ln_1", ("attention_norm",)),
    *with_biases("ln_2", ("ffn_norm",)),
    *with_biases("attn.c_attn", QUERY_KEY_VALUE, transposed=True),
    *with_biases("attn.c_proj", ("attention.wo",), transposed=True),
    *with_biases("mlp.c_fc", ("feed_forward.w1",), transposed=True),
    *with_biases("mlp.c_proj", ("feed_forward.w2",), transposed=True),
)
OUTSIDE = (
    *renamed({EMBEDDING: "transformer.wte.weight", POSITIONS: "transformer.wpe.weight", HEAD: HEAD}),
    *with_biases("transformer.ln_f", ("model.norm_out",)),
)

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
"""By their names; GELU itself is none of ours."""


def _read(path: Path, content: Content) -> dict[str, Any]:
    hidden = content["n_embd"]
    wide = 4 * hidden if isinstance(hidden, int) else hidden
    activation = ACTIVATIONS[content.get("activation_function") or "gelu_new"]
    return {"intermediate_size": given_or(content, "n_inner", wide), "hidden_act": activation}


def _write(model: ModelConfig) -> Content:
    activation = next((name for name, ours in ACTIVATIONS.items() if ours == model.hidden_act), "gelu_new")
    return {"n_inner": model.intermediate_size, "activation_function": activation}


FAMILY = Family(
    name="gpt2",
    network="GPT2LMHeadModel",
    keys={
        "vocab_size": ("vocab_size", REQUIRED),
        "hidden_size": ("n_embd", REQUIRED),
        "num_layers": ("n_layer", REQUIRED),
        "num_heads": ("n_head", REQUIRED),
        "max_position_embedding": ("n_positions", 1024),
        "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "initializer_range": ("initializer_range", 0.02),
        "hidden_dropout": ("resid_pdrop", 0.1),
        "embedding_dropout": ("embd_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
    },
    weights=WeightTable(
        (*OUTSIDE, *in_layers(OUR_LAYER, "transformer.h.{layer}", LAYER)),
        prefix="transformer.",
        computed=(".attn.bias", ".attn.masked_bias"),
    ),
    fixed={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "mlp_has_bias": True,
        "qkv_has_bias": True,
        "attn_proj_has_bias": True,
    },
    only={
        "activation_function": tuple(ACTIVATIONS),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    read=_read,
    write=_write,
)
