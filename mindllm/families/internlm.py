"""InternLM 1 (InternLM Team, 2023): Llama with a bias on all four projections of the attention; InternLM 2 (Cai et al., 2024):
Llama whose query, key and value are one matrix, head by head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.errors import UserError, shortened
from mindllm.families import llama
from mindllm.families.family import Content, given_or
from mindllm.families.llama import llama_like
from mindllm.families.shared_keys import read_rotary
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

SECOND_LAYER = (
    *renamed({"attention_norm.weight": "attention_norm.weight", "ffn_norm.weight": "ffn_norm.weight"}),
    *with_biases("attention.wqkv", QUERY_KEY_VALUE, by_head=True),
    *with_biases("attention.wo", ("attention.wo",)),
    *(Weight(f"feed_forward.{name}.weight", (f"feed_forward.{name}.weight",)) for name in ("w1", "w3", "w2")),
)
SECOND_OUTSIDE = {
    EMBEDDING: "model.tok_embeddings.weight",
    "model.norm_out.weight": "model.norm.weight",
    HEAD: "output.weight",
}


def _read_first(path: Path, content: Content) -> dict[str, Any]:
    """Read ``rotary``, an object with the base; its type ``dynamic`` changes sequences beyond the context only."""
    rotary = content.get("rotary") or {}
    if not isinstance(rotary, dict) or rotary.get("type", "origin") not in ("origin", "dynamic"):
        raise UserError(f"{path}: rotary: must be an object of type origin or dynamic (value {shortened(rotary)})")
    return read_rotary(path, content, theta=given_or(rotary, "base", 10000.0))


BIASES = dict.fromkeys(("qkv_has_bias", "attn_proj_has_bias"), ("bias", True))
INTERNLM = llama_like(
    "internlm", "InternLMForCausalLM", keys=BIASES, without=("n_kv_heads", "head_dim"), read=_read_first
)
INTERNLM2 = llama_like(
    "internlm2",
    "InternLM2ForCausalLM",
    keys=BIASES,
    without=("head_dim",),
    weights=WeightTable(
        (*renamed(SECOND_OUTSIDE), *in_layers(OUR_LAYER, "model.layers.{layer}", SECOND_LAYER)),
        computed=llama.COMPUTED,
    ),
)
FAMILIES = (INTERNLM, INTERNLM2)
