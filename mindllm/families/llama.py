"""Llama 1, 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024) and the same: CodeLlama, Yi, DeepSeek-Coder; in files of
another name Aquila 1 and 2 (BAAI, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindllm.families.family import REQUIRED, Family
from mindllm.families.shared_keys import read_rotary, write_rotary
from mindllm.families.weight_table import EMBEDDING, HEAD, OUR_LAYER, Weight, WeightTable, in_layers, renamed

KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "hidden_size": ("hidden_size", REQUIRED),
    "num_layers": ("num_hidden_layers", REQUIRED),
    "num_heads": ("num_attention_heads", REQUIRED),
    "intermediate_size": ("intermediate_size", REQUIRED),
    "n_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "max_position_embedding": ("max_position_embeddings", 2048),
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "initializer_range": ("initializer_range", 0.02),
    "attention_dropout": ("attention_dropout", 0.0),
}
ONLY = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
}
NORMS = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
ATTENTION = {
    **{f"attention.w{part}.{kind}": f"self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")},
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
COMPUTED = ("rotary_emb.inv_freq",)


def llama_weights(layer: tuple[Weight, ...], neighbours: bool = False) -> WeightTable:
    """Return the names of Llama with these entries for its layers."""
    outside = {EMBEDDING: "model.embed_tokens.weight", "model.norm_out.weight": "model.norm.weight", HEAD: HEAD}
    inside = in_layers(OUR_LAYER, "model.layers.{layer}", layer)
    return WeightTable((*renamed(outside), *inside), neighbours=neighbours, computed=COMPUTED)


WEIGHTS = llama_weights(renamed({**NORMS, **ATTENTION, **FEED_FORWARD}))


def llama_like(
    name: str,
    network: str,
    *,
    keys: Mapping[str, tuple[str, Any]] | None = None,
    without: tuple[str, ...] = (),
    only: Mapping[str, tuple[Any, ...]] | None = None,
    written: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Family:
    """Return a family that differs from Llama in the given fields of :class:`Family`.

    Args:
        name: its ``model_type``.
        network: its class in ``architectures``.
        keys: keys that are added to those of Llama, or have another name or default.
        without: keys of Llama that its files do not have.
        only: additional restrictions on values.
        written: additional constants in its files.
        fields: fields that replace those of Llama.
    """
    shared = {key: names for key, names in KEYS.items() if key not in without}
    return Family(
        name=name,
        network=network,
        keys={**shared, **(keys or {})},
        only={**ONLY, **(only or {})},
        written={"hidden_act": "silu", **(written or {})},
        **{"weights": WEIGHTS, "read": read_rotary, "write": write_rotary, **fields},
    )


FAMILY = llama_like(
    "llama",
    "LlamaForCausalLM",
    keys=dict.fromkeys(("qkv_has_bias", "attn_proj_has_bias"), ("attention_bias", False)),
    named=False,
    aliases=("Yi",),
    only={"partial_rotary_factor": (1,)},
    written={"mlp_bias": False},
)
AQUILA = llama_like("aquila", "AquilaForCausalLM", without=("head_dim",))
