"""Qwen 2 and 3 with experts (Yang et al., 2024 and 2025): the dense ones, with narrow experts in place of the feed-forward.

Qwen 2 has a shared expert under a gate, too, and does not renormalise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mindllm.config.model import ModelConfig
from mindllm.families import llama, qwen2, qwen3
from mindllm.families.expert_keys import (
    GATE_UP_DOWN,
    experts_weights,
    fused_experts,
    read_sparse_step,
    write_sparse_step,
)
from mindllm.families.family import Content, Family, given_or
from mindllm.families.weight_table import Weight, WeightTable, renamed

KEYS = {
    "num_experts_chosen": ("num_experts_per_tok", 8),
    "moe_intermediate_size": ("moe_intermediate_size", 768),
    "norm_topk_prob": ("norm_topk_prob", False),
}
SHARED = {
    **{f"feed_forward.shared.{ours}.weight": f"mlp.shared_expert.{name}.weight" for ours, name in GATE_UP_DOWN.items()},
    "feed_forward.shared_gate.weight": "mlp.shared_expert_gate.weight",
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


QWEN2_MOE = Family(
    name="qwen2_moe",
    network="Qwen2MoeForCausalLM",
    keys={
        **qwen2.FAMILY.keys,
        **KEYS,
        "num_experts_chosen": ("num_experts_per_tok", 4),
        "moe_intermediate_size": ("moe_intermediate_size", 1408),
        "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size", 5632),
    },
    weights=moe_weights(llama.FEED_FORWARD, SHARED),
    fixed={"qkv_has_bias": True, "use_shared_expert_gating": True},
    only={**llama.ONLY, "qkv_bias": (True,)},
    written={"hidden_act": "silu"},
    read=reads(qwen2.FAMILY, 60),
    write=writes(qwen2.FAMILY),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    network="Qwen3MoeForCausalLM",
    keys={**qwen3.FAMILY.keys, **KEYS, "head_dim": ("head_dim", None)},
    weights=moe_weights(llama.FEED_FORWARD, {}),
    fixed=qwen3.FAMILY.fixed,
    only=qwen3.FAMILY.only,
    written=qwen3.FAMILY.written,
    read=reads(qwen3.FAMILY, 128),
    write=writes(qwen3.FAMILY),
    unsaid=("routed_scaling_factor",),
)
FAMILIES = (QWEN2_MOE, QWEN3_MOE)
