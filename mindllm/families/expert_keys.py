"""Experts in ``config.json``: which layers have them, and the entries of their weights."""

from __future__ import annotations

from collections.abc import Mapping

from mindllm.config.architecture_keys import expert_layers
from mindllm.config.model import ModelConfig
from mindllm.families.family import Content, given_or
from mindllm.families.weight_table import EXPERT, FusedExperts, Weight, renamed

GATE_UP_DOWN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FUSED_LAYER = "model.layers.{layer}.mlp"  # in the newest files, whatever the family


def read_sparse_step(content: Content, experts: int) -> dict[str, object]:
    """Every ``decoder_sparse_step``-th layer has experts, but those of ``mlp_only_layers`` (Qwen 2 and 3)."""
    every, without = given_or(content, "decoder_sparse_step", 1), given_or(content, "mlp_only_layers", ())
    if (every == 1 and not without) or experts == 1:
        return {}
    count = content["num_hidden_layers"]
    return {"moe_layer_freq": [int((number + 1) % every == 0 and number not in without) for number in range(count)]}


def write_sparse_step(model: ModelConfig) -> Content:
    """The keys that :func:`read_sparse_step` reads."""
    without = [number for number, has in enumerate(expert_layers(model)) if not has]
    return {"decoder_sparse_step": 1, "mlp_only_layers": without}


def experts_weights(below: str, names: Mapping[str, str], router: str) -> tuple[Weight, ...]:
    """The entries of a router and its experts below ``below`` in their layer."""
    experts = {
        f"feed_forward.experts.{ours}.weight": f"{below}.experts.{EXPERT}.{theirs}.weight"
        for ours, theirs in names.items()
    }
    return renamed({"feed_forward.router.weight": f"{below}.{router}.weight", **experts})


def fused_experts(below: str, names: Mapping[str, str]) -> tuple[FusedExperts, ...]:
    """The stacks of the newest files, and the tensors that others hold instead."""

    def of_expert(ours: str) -> str:
        return f"model.layers.{{layer}}.{below}.experts.{EXPERT}.{names[ours]}.weight"

    return (
        FusedExperts(f"{FUSED_LAYER}.experts.gate_up_proj", (of_expert("w1"), of_expert("w3"))),
        FusedExperts(f"{FUSED_LAYER}.experts.down_proj", (of_expert("w2"),)),
    )
