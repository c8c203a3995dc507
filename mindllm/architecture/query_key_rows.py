"""The rows of query and key weights by the heads whose logits they scale: what qk-clip multiplies (Kimi K2, section 2.1).

A head's logits are linear in its rows of the query weight and in those of the key weight, biases included. Queries that share a
key head share a factor, that of the largest logit among them, as in Megatron-LM: what scales the key scales all of them. In
latent attention the rotated part of the key is one for all heads, so the rotated part of the query takes the whole factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindllm.architecture.decoder import Architecture
from mindllm.architecture.parts import AlibiSpec, AttentionSpec, LatentAttentionSpec

HALF, WHOLE = 0.5, 1.0


@dataclass(frozen=True)
class QueryKeyRows:
    """Rows of one weight, first dimension, in ``groups`` of as many: of the query heads of one key head, or of that key head.

    ``power``: of a group's factor, by which its rows are multiplied.
    """

    groups: int
    power: float


def query_key_rows(architecture: Architecture) -> dict[str, QueryKeyRows]:
    """Return the query and key rows of all layers, by weight name."""
    return {
        f"model.layers.{number}.attention.{name}": rows
        for number, layer in enumerate(architecture.layers)
        for name, rows in rows_of_attention(layer.attention).items()
    }


def rows_of_attention(spec: AttentionSpec | LatentAttentionSpec) -> Mapping[str, QueryKeyRows]:
    """Return the query and key rows of one attention, by name within it."""
    half = QueryKeyRows(spec.num_kv_heads, HALF)
    if isinstance(spec, AttentionSpec):
        return {name: half for name in ("wq.weight", "wk.weight", "wq.bias", "wk.bias") if name in spec.weights()}
    plain, rotary = ("wq_plain", "wq_rotary") if spec.q_lora_rank is None else ("wq_up_plain", "wq_up_rotary")
    return {
        f"{plain}.weight": half,
        f"{rotary}.weight": QueryKeyRows(spec.num_heads, WHOLE),
        "wk_plain.weight": half,
    }


def why_not_linear(spec: AttentionSpec | LatentAttentionSpec) -> str:
    """Return why scaling query and key rows does not scale the logits; empty if it does."""
    if not isinstance(spec, AttentionSpec):
        return ""
    if spec.query_key_norm is not None:
        return "heads of queries and keys are normed (qk_layernorm), which undoes any factor of their weights"
    if spec.soft_cap is not None:
        return f"logits stay below {spec.soft_cap:g} by themselves (attn_logit_softcapping), and are not linear in the weights"
    if isinstance(spec.position, AlibiSpec):
        return "logits hold a bias that no weight scales (position_embedding_type alibi)"
    return ""
