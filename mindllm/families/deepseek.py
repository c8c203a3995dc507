"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024): latent attention, dense first layers, then narrow experts with shared experts.

V2 scores by softmax without normalization; V3 scores by sigmoids, with a bias that only affects the choice. Files of V3 have
multi-token prediction layers after the last layer, each with a copy of the embedding and the head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig, expert_layers
from mindllm.errors import UserError, shortened
from mindllm.families import llama
from mindllm.families.family import REQUIRED, Content, Family, given_or
from mindllm.families.shared_keys import GATE_UP_DOWN, experts_weights, fused_experts, read_rotary, write_rotary
from mindllm.families.weight_table import EMBEDDING, HEAD, OUR_LAYER, Weight, in_layers, renamed

KEYS: dict[str, tuple[str, Any]] = {
    **{ours: names for ours, names in llama.KEYS.items() if ours not in ("head_dim", "n_kv_heads")},
    **{ours: (ours, default) for ours, default in (("kv_lora_rank", 512), ("qk_nope_head_dim", 128))},
    **{ours: (ours, default) for ours, default in (("qk_rope_head_dim", 64), ("v_head_dim", 128))},
    "num_experts_chosen": ("num_experts_per_tok", REQUIRED),
    "moe_intermediate_size": ("moe_intermediate_size", REQUIRED),
    "first_k_dense_replace": ("first_k_dense_replace", 0),
    "routed_scaling_factor": ("routed_scaling_factor", 1.0),
}
ONLY = {**llama.ONLY, "attention_bias": (False,), "rope_interleave": (True,)}
WRITTEN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
ATTENTION = {
    "attention.wq_down.weight": "self_attn.q_a_proj.weight",
    "attention.query_latent_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.key_value_latent_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
}
SHARED = {
    f"feed_forward.shared.{ours}.weight": f"mlp.shared_experts.{name}.weight" for ours, name in GATE_UP_DOWN.items()
}
BIAS = {"feed_forward.router.bias": "mlp.gate.e_score_correction_bias"}
LAYER = (
    *renamed({**llama.NORMS, **ATTENTION, **llama.FEED_FORWARD, **SHARED, **BIAS}),
    *experts_weights("mlp", GATE_UP_DOWN, "gate"),
    Weight("self_attn.q_proj.weight", ("attention.wq_plain.weight", "attention.wq_rotary.weight"), by_head=True),
    Weight(
        "self_attn.q_b_proj.weight", ("attention.wq_up_plain.weight", "attention.wq_up_rotary.weight"), by_head=True
    ),
    Weight("self_attn.kv_a_proj_with_mqa.weight", ("attention.wkv_down.weight", "attention.wk_rotary.weight")),
    Weight("self_attn.kv_b_proj.weight", ("attention.wk_plain.weight", "attention.wv.weight"), by_head=True),
)
WEIGHTS = replace(
    llama.llama_weights(LAYER, neighbours=True), fused=fused_experts("mlp", GATE_UP_DOWN), further_layers=True
)
MTP_NAMES = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_norm.weight": "shared_head.norm.weight",
}
HF_LAYER = "model.layers.{layer}"
WITH_PREDICTION = replace(
    WEIGHTS,
    weights=(*WEIGHTS.weights, *in_layers(OUR_LAYER, HF_LAYER, renamed(MTP_NAMES))),
    copies=((f"{HF_LAYER}.embed_tokens.weight", EMBEDDING), (f"{HF_LAYER}.shared_head.head.weight", HEAD)),
)
GREEDY, LIMITED = "greedy", "group_limited_greedy"


def read_latent(path: Path, content: Content, shared_experts: int) -> dict[str, Any]:
    """Return the keys that V2 and V3 share; ``shared_experts`` is the default number of shared experts."""
    heads, kv_heads = content["num_attention_heads"], content.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UserError(
            f"{path}: num_key_value_heads: must be num_attention_heads {heads} (value {shortened(kv_heads)})"
        )
    shared = given_or(content, "n_shared_experts", shared_experts)
    every = given_or(content, "moe_layer_freq", 1)
    if every != 1 and not isinstance(every, list):
        raise UserError(f"{path}: moe_layer_freq: must be 1, or 1 or 0 for each layer (value {shortened(every)})")
    return {
        **read_rotary(path, content),
        **({} if every == 1 else {"moe_layer_freq": every}),
        "q_lora_rank": content.get("q_lora_rank", 1536),  # null differs from an absent key
        "moe_shared_expert_intermediate_size": shared * content["moe_intermediate_size"],
    }


def read_v2(path: Path, content: Content) -> dict[str, Any]:
    """Return the keys of V2. Groups apply only if the method is limited by them."""
    method = given_or(content, "topk_method", GREEDY)
    if method not in (GREEDY, LIMITED):
        raise UserError(f"{path}: topk_method: must be {GREEDY} or {LIMITED} (value {shortened(method)})")
    names = ("n_group", "topk_group") if method == LIMITED else ()
    return {**read_latent(path, content, 2), **{name: given_or(content, name, 1) for name in names}}


def write_latent(model: ModelConfig) -> Content:
    """Return the keys of :func:`read_latent`. Layers are listed unless the dense ones come first."""
    layers = expert_layers(model)
    dense = next((number for number, has in enumerate(layers) if has), model.num_layers)
    shared = model.moe_shared_expert_intermediate_size or 0
    if shared % model.moe_intermediate_size:
        raise UserError("the shared expert is not as wide as some experts together")
    return {
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": model.q_lora_rank,
        "n_shared_experts": shared // model.moe_intermediate_size,
        "n_group": model.n_group,
        "topk_group": model.topk_group,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1 if all(layers[dense:]) else [int(has) for has in layers],
        "rope_interleave": True,
        **write_rotary(model),
    }


def write_v2(model: ModelConfig) -> Content:
    """Return the keys of V2, with the method that the groups require."""
    return {**write_latent(model), "topk_method": LIMITED if model.n_group > 1 else GREEDY}


V2 = Family(
    name="deepseek_v2",
    network="DeepseekV2ForCausalLM",
    keys={**KEYS, "expert_num": ("n_routed_experts", 64)},
    weights=WEIGHTS,
    fixed={"norm_topk_prob": False},
    only={**ONLY, "norm_topk_prob": (False,), "scoring_func": ("softmax",)},
    written={**WRITTEN, "norm_topk_prob": False, "scoring_func": "softmax"},
    read=read_v2,
    write=write_v2,
)
V3 = Family(
    name="deepseek_v3",
    network="DeepseekV3ForCausalLM",
    keys={
        **KEYS,
        "expert_num": ("n_routed_experts", 256),
        "n_group": ("n_group", 8),
        "topk_group": ("topk_group", 4),
        "routed_scaling_factor": ("routed_scaling_factor", 2.5),
        "norm_topk_prob": ("norm_topk_prob", True),
        "first_k_dense_replace": ("first_k_dense_replace", 3),
        "num_nextn_predict_layers": ("num_nextn_predict_layers", 0),
    },
    weights=WITH_PREDICTION,
    fixed={"use_gating_sigmoid": True, "balance_via_topk_bias": True},
    only={**ONLY, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    written={**WRITTEN, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    read=lambda path, content: read_latent(path, content, 1),
    write=write_latent,
)
FAMILIES = (V2, V3)
