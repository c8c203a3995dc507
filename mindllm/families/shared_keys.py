"""Keys of ``config.json`` that families share: rotary positions, layers with a sliding window, layers with experts.

Rotary positions are ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``, which newer files have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindllm.config.decoder.architecture import FULL, SLIDING, expert_layers, layer_types
from mindllm.config.model import ModelConfig
from mindllm.errors import UserError, shortened
from mindllm.families.family import Content, given_or
from mindllm.families.weight_table import EXPERT, FusedExperts, Weight, renamed

FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
        "original_max_position_embeddings",
    ),
}
REFUSED = {"truncate": (True,)}  # what they may say of YaRN
GATE_UP_DOWN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FUSED_LAYER = "model.layers.{layer}.mlp"  # in the newest files, whatever the family


def read_rotary(path: Path, content: Content, theta: float = 10000.0, partial: float = 1.0) -> dict[str, Any]:
    """``theta``, ``rope_scaling`` and the part that is turned, whichever layout says them.

    Raises:
        UserError: a scaling that is not known.
    """
    layout = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    values = content.get(layout) or {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: {layout}: must be an object (value {shortened(values)})")
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in FIELDS:
        raise UserError(
            f"{path}: {layout}.rope_type: not supported (value {shortened(kind)}); supported: {', '.join(FIELDS)}"
        )
    for key, allowed in REFUSED.items():
        if values.get(key) is not None and values[key] not in allowed:
            raise UserError(f"{path}: {layout}.{key}: not supported (value {shortened(values[key])})")
    turned = values.get("partial_rotary_factor", given_or(content, "partial_rotary_factor", partial))
    if partial == 1 and turned != 1:
        where = f"{layout}." if "partial_rotary_factor" in values else ""
        raise UserError(f"{path}: {where}partial_rotary_factor: must be 1 (value {shortened(turned)})")
    fields = {name: values[name] for name in FIELDS[kind] if values.get(name) is not None}
    scaling = None if kind == "default" else {"type": kind, **fields}
    base = values.get("rope_theta", given_or(content, "rope_theta", theta))
    return {"theta": base, "rope_scaling": scaling} | ({} if partial == 1 else {"partial_rotary_factor": turned})


def write_rotary(model: ModelConfig) -> Content:
    """The keys of the older layout, which new readers know too."""
    return {"rope_theta": model.theta, "rope_scaling": written_scaling(model)}


def written_scaling(model: ModelConfig) -> Content | None:
    """``rope_scaling`` with the names of their file."""
    if model.rope_scaling is None:
        return None
    fields = model.rope_scaling.model_dump(exclude_none=True)
    return {"rope_type": fields.pop("type"), **fields}


def read_pattern(content: Content, every: int) -> dict[str, object]:
    """``layer_types``, or every so manieth layer without a window (``sliding_window_pattern``, else ``every``)."""
    if content.get("layer_types") is not None:
        return {"layer_types": content["layer_types"]}
    return {"sliding_window_pattern": content.get("sliding_window_pattern", every)}


def written_types(model: ModelConfig) -> list[str]:
    """``layer_types``, a word for each layer."""
    return list(layer_types(model))


def read_last_layers(content: Content) -> dict[str, object]:
    """Windows of the layers from ``max_window_layers`` on, if ``use_sliding_window`` (Qwen 2 and 3)."""
    if not content.get("use_sliding_window") or content.get("sliding_window") is None:
        return {}
    types = content.get("layer_types")
    if types is None:
        first, count = content.get("max_window_layers", 28), content["num_hidden_layers"]
        types = [SLIDING if number >= first else FULL for number in range(count)]
    return {"sliding_window": content["sliding_window"], "layer_types": types}


def write_last_layers(model: ModelConfig) -> Content:
    """The keys that :func:`read_last_layers` reads."""
    if model.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        "layer_types": written_types(model),
        "max_window_layers": layer_types(model).index(SLIDING) if SLIDING in layer_types(model) else model.num_layers,
    }


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
