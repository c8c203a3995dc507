"""Mistral 7B (Jiang et al., 2023): Llama with a sliding window in every layer; openbuddy-zephyr, which is trained on from it.

Mixtral (Jiang et al., 2024): Mistral whose feed-forward is a mixture of experts; the chosen weights are renormalised.
"""

from __future__ import annotations

from dataclasses import replace

from mindllm.families import llama
from mindllm.families.llama import llama_like
from mindllm.families.shared_keys import experts_weights, fused_experts, read_rotary, write_rotary
from mindllm.families.weight_table import renamed

MIXTRAL_BASE = 1e6  # of the rotations, where the file does not give rope_theta
WINDOW = 4096  # where the file does not say
BELOW = "block_sparse_moe"
NAMES = {"w1": "w1", "w3": "w3", "w2": "w2"}
ROUTER = f"model.layers.{{layer}}.{BELOW}.gate.weight"

MISTRAL = llama_like(
    "mistral",
    "MistralForCausalLM",
    keys={"max_position_embedding": ("max_position_embeddings", 32 * WINDOW)},
    read=lambda path, content: {
        "sliding_window": content.get("sliding_window", WINDOW),
        **read_rotary(path, content),
    },
    write=lambda model: {"sliding_window": model.sliding_window, **write_rotary(model)},
)
MIXTRAL = llama_like(
    "mixtral",
    "MixtralForCausalLM",
    keys={
        "max_position_embedding": ("max_position_embeddings", 131072),
        "n_kv_heads": ("num_key_value_heads", 8),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "expert_num": ("num_local_experts", 8),
        "num_experts_chosen": ("num_experts_per_tok", 2),
    },
    weights=replace(
        llama.llama_weights((*renamed({**llama.NORMS, **llama.ATTENTION}), *experts_weights(BELOW, NAMES, "gate"))),
        fused=fused_experts(BELOW, NAMES),
        aliases=(("model.layers.{layer}.mlp.gate.weight", ROUTER),),
    ),
    only={"router_jitter_noise": (0,)},
    read=lambda path, content: {
        "sliding_window": content.get("sliding_window"),
        **read_rotary(path, content, theta=MIXTRAL_BASE),
    },
    write=lambda model: {"sliding_window": model.sliding_window, **write_rotary(model)},
)
