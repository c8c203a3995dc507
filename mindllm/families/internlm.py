"""InternLM 1 (InternLM Team, 2023): Llama with a bias on all four projections of the attention; InternLM 2 (Cai et al., 2024):
Llama whose query, key and value are one matrix, head by head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.errors import UserError, shortened
from mindllm.families import llama
from mindllm.families.family import Content, Family, given_or
from mindllm.families.shared_keys import read_rotary, write_rotary
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
INTERNLM = Family(
    name="internlm",
    network="InternLMForCausalLM",
    keys={key: value for key, value in llama.KEYS.items() if key not in ("n_kv_heads", "head_dim")} | BIASES,
    weights=llama.WEIGHTS,
    only=llama.ONLY,
    written={"hidden_act": "silu"},
    read=_read_first,
    write=write_rotary,
)
INTERNLM2 = Family(
    name="internlm2",
    network="InternLM2ForCausalLM",
    keys={key: value for key, value in llama.KEYS.items() if key != "head_dim"} | BIASES,
    weights=WeightTable(
        (*renamed(SECOND_OUTSIDE), *in_layers(OUR_LAYER, "model.layers.{layer}", SECOND_LAYER)),
        computed=llama.COMPUTED,
    ),
    only=llama.ONLY,
    written={"hidden_act": "silu"},
    read=read_rotary,
    write=write_rotary,
)
FAMILIES = (INTERNLM, INTERNLM2)
