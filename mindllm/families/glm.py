"""GLM-4 9B as ``transformers`` has it, the GLM-4 of 2025, and ChatGLM3 (GLM Team, 2024) with GLM-4 9B in its own files.

Rotary positions turn neighbouring channels of half a head; gate and up projection are one matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.families import llama
from mindllm.families.family import REQUIRED, Content, Family, given_or
from mindllm.families.llama import llama_like
from mindllm.families.shared_keys import read_rotary, write_rotary
from mindllm.families.weight_table import (
    EMBEDDING,
    HEAD,
    OUR_LAYER,
    QUERY_KEY_VALUE,
    Weight,
    WeightTable,
    in_layers,
    renamed,
    with_biases,
)

GATE_UP = ("feed_forward.w1.weight", "feed_forward.w3.weight")
FUSED = (
    Weight("mlp.gate_up_proj.weight", GATE_UP),
    *renamed({**llama.ATTENTION, "feed_forward.w2.weight": "mlp.down_proj.weight"}),
)
SANDWICH = {
    **llama.NORMS,
    "attention_post_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_post_norm.weight": "post_mlp_layernorm.weight",
}
KEYS = {
    "head_dim": ("head_dim", 128),
    "max_position_embedding": ("max_position_embeddings", 131072),
    "rms_norm_eps": ("rms_norm_eps", 1.5625e-07),
    "qkv_has_bias": ("attention_bias", False),
}


def _read(path: Path, content: Content) -> dict[str, Any]:
    return read_rotary(path, content, partial=0.5)


def _write(model: ModelConfig) -> Content:
    return {"partial_rotary_factor": model.partial_rotary_factor, **write_rotary(model)}


GLM = llama_like(
    "glm",
    "GlmForCausalLM",
    keys=KEYS,
    weights=llama.llama_weights((*renamed(llama.NORMS), *FUSED), neighbours=True),
    read=_read,
    write=_write,
)
GLM4 = llama_like(
    "glm4",
    "Glm4ForCausalLM",
    keys=KEYS,
    weights=llama.llama_weights((*renamed(SANDWICH), *FUSED), neighbours=True),
    fixed={"sandwich_norm": True},
    read=_read,
    write=_write,
)

CHAT_BASE = 10000.0  # of the rotary frequencies, times rope_ratio
CHAT_LAYER = (
    *renamed(llama.NORMS),
    *with_biases("self_attention.query_key_value", QUERY_KEY_VALUE),
    *with_biases("self_attention.dense", ("attention.wo",)),
    Weight("mlp.dense_h_to_4h.weight", GATE_UP),
    Weight("mlp.dense_4h_to_h.weight", ("feed_forward.w2.weight",)),
)
CHAT_OUTSIDE = {
    EMBEDDING: "transformer.embedding.word_embeddings.weight",
    "model.norm_out.weight": "transformer.encoder.final_layernorm.weight",
    HEAD: "transformer.output_layer.weight",
}


def _read_chat(path: Path, content: Content) -> dict[str, Any]:
    heads = content["num_attention_heads"]
    grouped = given_or(content, "multi_query_attention", False)
    return {
        "theta": CHAT_BASE * given_or(content, "rope_ratio", 1),
        "n_kv_heads": given_or(content, "multi_query_group_num", 1) if grouped else heads,
    }


def _write_chat(model: ModelConfig) -> Content:
    return {
        "rope_ratio": model.theta / CHAT_BASE,
        "multi_query_attention": model.n_kv_heads != model.num_heads,
        "multi_query_group_num": model.n_kv_heads,
    }


CHATGLM = Family(
    name="chatglm",
    network="ChatGLMForConditionalGeneration",
    keys={
        "vocab_size": ("padded_vocab_size", REQUIRED),
        "hidden_size": ("hidden_size", REQUIRED),
        "num_layers": ("num_layers", REQUIRED),
        "num_heads": ("num_attention_heads", REQUIRED),
        "intermediate_size": ("ffn_hidden_size", REQUIRED),
        "head_dim": ("kv_channels", 128),
        "max_position_embedding": ("seq_length", 2048),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
        "qkv_has_bias": ("add_qkv_bias", False),
        "tie_word_embeddings": ("tie_word_embeddings", False),
    },
    weights=WeightTable(
        (*renamed(CHAT_OUTSIDE), *in_layers(OUR_LAYER, "transformer.encoder.layers.{layer}", CHAT_LAYER)),
        neighbours=True,
        computed=("rotary_pos_emb.inv_freq",),
    ),
    fixed={"partial_rotary_factor": 0.5},
    only={
        "add_bias_linear": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "original_rope": (True,),
        "post_layer_norm": (True,),
        "rmsnorm": (True,),
        "pre_seq_len": (),
        "quantization_bit": (0,),
    },
    written={
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "original_rope": True,
        "post_layer_norm": True,
        "rmsnorm": True,
    },
    read=_read_chat,
    write=_write_chat,
)
FAMILIES = (GLM, GLM4, CHATGLM)
