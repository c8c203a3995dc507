"""Gemma 1, 2 and 3, text (Gemma Team, 2024 and 2025): scaled embeddings tied to the head, GeGLU, zero-centered norms.

Gemma 2 has additional norms after attention and feed-forward, soft caps, and a window in every other layer. Gemma 3 has query and
key norms instead of caps, five layers with a window for each one without, and separate rotary frequencies for layers with a
window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.config.model import FULL, SLIDING, ModelConfig
from mindllm.errors import UserError, shortened
from mindllm.families import llama
from mindllm.families.family import Content, Family, given_or
from mindllm.families.shared_keys import read_pattern, read_rotary, write_rotary, written_scaling, written_types
from mindllm.families.weight_table import renamed

TANH = ("gelu", "gelu_pytorch_tanh")  # the code always computes the tanh form
ONLY = {
    "hidden_act": TANH,
    "hidden_activation": TANH,
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
}
FIXED = {
    "layernorm_zero_centered_gamma": True,
    "hidden_act": "gelu_tanh",
    "scale_embeddings": True,
}
KEYS = {
    **llama.KEYS,
    "head_dim": ("head_dim", 256),
    "max_position_embedding": ("max_position_embeddings", 8192),
    "tie_word_embeddings": ("tie_word_embeddings", True),
}
WRITTEN = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
SANDWICH = llama.llama_weights(
    renamed(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "attention_post_norm.weight": "post_attention_layernorm.weight",
            "ffn_norm.weight": "pre_feedforward_layernorm.weight",
            "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
            **llama.ATTENTION,
            **llama.FEED_FORWARD,
        }
    )
)
CAPPED: dict[str, tuple[str, Any]] = {
    "query_pre_attn_scalar": ("query_pre_attn_scalar", 256),
    "sliding_window": ("sliding_window", 4096),
    "final_logit_softcapping": ("final_logit_softcapping", None),
    "attn_logit_softcapping": ("attn_logit_softcapping", None),
}


def _read_second(path: Path, content: Content) -> dict[str, Any]:
    caps = {
        key: content.get(key, cap) for key, cap in (("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0))
    }
    return {**caps, **read_pattern(content, 2), **read_rotary(path, content)}


def _write_windows(model: ModelConfig) -> Content:
    return {**_scalar(model), "layer_types": written_types(model), **write_rotary(model)}


def _scalar(model: ModelConfig) -> Content:
    """Return the scale as an integer if it is one, which Gemma's files require."""
    scalar = float(model.query_pre_attn_scalar or model.head_dim)
    return {"query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar}


def _read_third(path: Path, content: Content) -> dict[str, Any]:
    """Return the keys of Gemma 3. Newer files have rotary parameters per layer type; ``rope_scaling`` is for full attention."""
    nested, scaling = content.get("rope_parameters") or {}, content.get("rope_scaling") or {}
    if not isinstance(nested, dict) or nested.keys() - {FULL, SLIDING}:
        raise UserError(f"{path}: rope_parameters: must hold {FULL} and {SLIDING} (value {shortened(nested)})")
    if not isinstance(scaling, dict) or ("type" in scaling and "rope_type" not in scaling):
        raise UserError(f"{path}: rope_scaling: must be an object with rope_type (value {shortened(scaling)})")
    local = nested.get(SLIDING) or {}
    if set(local) - {"rope_type", "rope_theta"} or local.get("rope_type", "default") != "default":
        raise UserError(f"{path}: rope_parameters.{SLIDING}: scaling is not supported (value {shortened(local)})")
    full = {"rope_parameters": {**(nested.get(FULL) or {}), **scaling}, "rope_theta": content.get("rope_theta")}
    full |= {key: content.get(key) for key in ("max_position_embeddings", "partial_rotary_factor")}
    base = local.get("rope_theta", given_or(content, "rope_local_base_freq", 10000.0))
    return {"rope_local_base_freq": base, **read_pattern(content, 6), **read_rotary(path, full, theta=1e6)}


def _write_third(model: ModelConfig) -> Content:
    return {
        **_scalar(model),
        "layer_types": written_types(model),
        "rope_theta": model.theta,
        "rope_local_base_freq": model.rope_local_base_freq,
        "rope_scaling": written_scaling(model),
    }


GEMMA = Family(
    name="gemma",
    network="GemmaForCausalLM",
    keys=KEYS,
    weights=llama.WEIGHTS,
    fixed=FIXED,
    only=ONLY,
    written=WRITTEN,
    read=read_rotary,
    write=write_rotary,
)
GEMMA2 = Family(
    name="gemma2",
    network="Gemma2ForCausalLM",
    keys={**KEYS, **CAPPED},
    weights=SANDWICH,
    fixed={**FIXED, "sandwich_norm": True},
    only=ONLY,
    written=WRITTEN,
    read=_read_second,
    write=_write_windows,
)
GEMMA3 = Family(
    name="gemma3_text",
    network="Gemma3ForCausalLM",
    keys={**KEYS, **CAPPED, "max_position_embedding": ("max_position_embeddings", 131072)},
    weights=SANDWICH,
    fixed={**FIXED, "sandwich_norm": True, "qk_layernorm": True},
    only=ONLY,
    written=WRITTEN,
    read=_read_third,
    write=_write_third,
)
FAMILIES = (GEMMA, GEMMA2, GEMMA3)
