"""Qwen 1 (Bai et al., 2023), 1.5, 2 and 2.5 (Yang et al., 2024) and 3 (Yang et al., 2025), dense and with experts.

The first is Llama with a bias on query, key and value, which are one matrix. Its ``intermediate_size`` counts both halves of the
gated feed-forward, and its second matrix is the gate. What its code does beyond ``seq_length`` only (other rotary bases, queries
scaled by their position) is not computed: ``seq_length`` is the longest context.

The second is Llama with that bias, the third has a norm on every head of queries and keys instead. Those with experts are the
dense ones, with narrow experts in place of the feed-forward; of Qwen 2 with a shared expert under a gate, too, and not
renormalised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.errors import UserError, shortened
from mindllm.families import llama
from mindllm.families.family import REQUIRED, Content, Family, given_or
from mindllm.families.llama import llama_like
from mindllm.families.shared_keys import (
    GATE_UP_DOWN,
    experts_weights,
    fused_experts,
    read_last_layers,
    read_rotary,
    read_sparse_step,
    write_last_layers,
    write_rotary,
    write_sparse_step,
)
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

FIRST_LAYER = (
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
FIRST_OUTSIDE = {EMBEDDING: "transformer.wte.weight", "model.norm_out.weight": "transformer.ln_f.weight", HEAD: HEAD}
EXPERT_KEYS = {
    "num_experts_chosen": ("num_experts_per_tok", 8),
    "moe_intermediate_size": ("moe_intermediate_size", 768),
    "norm_topk_prob": ("norm_topk_prob", False),
}
SHARED = {
    **{f"feed_forward.shared.{ours}.weight": f"mlp.shared_expert.{name}.weight" for ours, name in GATE_UP_DOWN.items()},
    "feed_forward.shared_gate.weight": "mlp.shared_expert_gate.weight",
}


def _read_first(path: Path, content: Content) -> dict[str, Any]:
    both = content.get("intermediate_size")
    if not isinstance(both, int) or both % 2:
        raise UserError(f"{path}: intermediate_size: must be an even number, twice the width (value {shortened(both)})")
    return {"intermediate_size": both // 2}


def _write_first(model: ModelConfig) -> Content:
    return {
        "intermediate_size": 2 * model.intermediate_size,
        "max_position_embeddings": model.max_position_embedding,
    }


def moe_weights(shared: dict[str, str]) -> WeightTable:
    """Return the names of a Qwen with experts; some of its layers may be dense."""
    layer: tuple[Weight, ...] = (
        *renamed({**llama.NORMS, **llama.ATTENTION, **llama.FEED_FORWARD}),
        *experts_weights("mlp", GATE_UP_DOWN, "gate"),
        *renamed(shared),
    )
    return replace(llama.llama_weights(layer), fused=fused_experts("mlp", GATE_UP_DOWN))


QWEN = Family(
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
        (*renamed(FIRST_OUTSIDE), *in_layers(OUR_LAYER, "transformer.h.{layer}", FIRST_LAYER)),
        computed=("rotary_emb.inv_freq",),
    ),
    fixed={"qkv_has_bias": True},
    only={"no_bias": (True,), "rotary_pct": (1,), "scale_attn_weights": (True,)},
    written={"no_bias": True, "rotary_pct": 1.0, "use_dynamic_ntk": True, "use_logn_attn": True},
    read=_read_first,
    write=_write_first,
)


def _read_dense(path: Path, content: Content) -> dict[str, Any]:
    return {**read_last_layers(content), **read_rotary(path, content)}


def _write_dense(model: ModelConfig) -> Content:
    return {**write_last_layers(model), **write_rotary(model)}


def _read_experts(experts: int) -> Callable[[Path, Content], dict[str, Any]]:
    """Return the function that reads the keys of a family with ``experts`` experts by default."""

    def read(path: Path, content: Content) -> dict[str, Any]:
        count = given_or(content, "num_experts", given_or(content, "num_local_experts", experts))
        return {"expert_num": count, **read_sparse_step(content, count), **_read_dense(path, content)}

    return read


def _write_experts(model: ModelConfig) -> Content:
    return {"num_experts": model.expert_num, **write_sparse_step(model), **_write_dense(model)}


CONTEXT = ("max_position_embeddings", 32768)
QWEN2 = llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    keys={"max_position_embedding": CONTEXT},
    fixed={"qkv_has_bias": True},
    read=_read_dense,
    write=_write_dense,
)
QWEN3 = llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    keys={"head_dim": ("head_dim", 128), "max_position_embedding": CONTEXT},
    fixed={"qk_layernorm": True},
    only={"attention_bias": (False,)},
    written={"attention_bias": False},
    read=_read_dense,
    write=_write_dense,
)
QWEN2_MOE = llama_like(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    keys={
        **EXPERT_KEYS,
        "max_position_embedding": CONTEXT,
        "num_experts_chosen": ("num_experts_per_tok", 4),
        "moe_intermediate_size": ("moe_intermediate_size", 1408),
        "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size", 5632),
    },
    weights=moe_weights(SHARED),
    fixed={"qkv_has_bias": True, "use_shared_expert_gating": True},
    only={"qkv_bias": (True,)},
    read=_read_experts(60),
    write=_write_experts,
)
QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    keys={**EXPERT_KEYS, "max_position_embedding": CONTEXT},
    weights=moe_weights({}),
    fixed={"qk_layernorm": True},
    only={"attention_bias": (False,)},
    written={"attention_bias": False},
    read=_read_experts(128),
    write=_write_experts,
    unsaid=("routed_scaling_factor",),
)
