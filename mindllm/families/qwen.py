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


def moe_weights(dense: dict[str, str], shared: dict[str, str]) -> WeightTable:
    """The names of a Qwen with experts, in some layers of which ``dense`` stand instead."""
    layer: tuple[Weight, ...] = (
        *renamed({**llama.NORMS, **llama.ATTENTION, **dense}),
        *experts_weights("mlp", GATE_UP_DOWN, "gate"),
        *renamed(shared),
    )
    return replace(llama.llama_weights(layer), fused=fused_experts("mlp", GATE_UP_DOWN))


def reads(dense: Family, default: int) -> Callable[[Path, Content], dict[str, object]]:
    """What the dense family reads, and the layers with experts."""

    def read(path: Path, content: Content) -> dict[str, object]:
        experts = given_or(content, "num_experts", given_or(content, "num_local_experts", default))
        return {"expert_num": experts, **read_sparse_step(content, experts), **dense.read(path, content)}

    return read


def writes(dense: Family) -> Callable[[ModelConfig], Content]:
    """The keys for :func:`reads`."""
    return lambda model: {"num_experts": model.expert_num, **write_sparse_step(model), **dense.write(model)}


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
QWEN2 = Family(
    name="qwen2",
    network="Qwen2ForCausalLM",
    keys={**llama.KEYS, "max_position_embedding": ("max_position_embeddings", 32768)},
    weights=llama.WEIGHTS,
    fixed={"qkv_has_bias": True},
    only=llama.ONLY,
    written={"hidden_act": "silu"},
    read=lambda path, content: {**read_last_layers(content), **read_rotary(path, content)},
    write=lambda model: {**write_last_layers(model), **write_rotary(model)},
)
QWEN3 = Family(
    name="qwen3",
    network="Qwen3ForCausalLM",
    keys={
        **llama.KEYS,
        "head_dim": ("head_dim", 128),
        "max_position_embedding": ("max_position_embeddings", 32768),
    },
    weights=llama.WEIGHTS,
    fixed={"qk_layernorm": True},
    only={**llama.ONLY, "attention_bias": (False,)},
    written={"hidden_act": "silu", "attention_bias": False},
    read=lambda path, content: {**read_last_layers(content), **read_rotary(path, content)},
    write=lambda model: {**write_last_layers(model), **write_rotary(model)},
)
QWEN2_MOE = Family(
    name="qwen2_moe",
    network="Qwen2MoeForCausalLM",
    keys={
        **QWEN2.keys,
        **EXPERT_KEYS,
        "num_experts_chosen": ("num_experts_per_tok", 4),
        "moe_intermediate_size": ("moe_intermediate_size", 1408),
        "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size", 5632),
    },
    weights=moe_weights(llama.FEED_FORWARD, SHARED),
    fixed={"qkv_has_bias": True, "use_shared_expert_gating": True},
    only={**llama.ONLY, "qkv_bias": (True,)},
    written={"hidden_act": "silu"},
    read=reads(QWEN2, 60),
    write=writes(QWEN2),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    network="Qwen3MoeForCausalLM",
    keys={**QWEN3.keys, **EXPERT_KEYS, "head_dim": ("head_dim", None)},
    weights=moe_weights(llama.FEED_FORWARD, {}),
    fixed=QWEN3.fixed,
    only=QWEN3.only,
    written=QWEN3.written,
    read=reads(QWEN3, 128),
    write=writes(QWEN3),
    unsaid=("routed_scaling_factor",),
)
