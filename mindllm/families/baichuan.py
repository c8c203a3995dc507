"""Baichuan 1 and 2 (Yang et al., 2023): Llama with query, key and value in one matrix.

The 13B models have ALiBi, recognized by the missing ``max_position_embeddings``. Baichuan 2 has a normalized head, recognized by
``z_loss_weight`` (7B) or its vocabulary. Weights are stored as trained, without normalization.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.families import llama
from mindllm.families.family import Content, given_or
from mindllm.families.llama import llama_like
from mindllm.families.shared_keys import read_rotary, write_rotary
from mindllm.families.weight_table import QUERY_KEY_VALUE, Weight, renamed

SECOND_VOCABULARY = 125696
PACKED = Weight("self_attn.W_pack.weight", tuple(f"{name}.weight" for name in QUERY_KEY_VALUE))
LAYER = (
    *renamed({**llama.NORMS, **llama.FEED_FORWARD, "attention.wo.weight": "self_attn.o_proj.weight"}),
    PACKED,
)


def _read(path: Path, content: Content) -> dict[str, Any]:
    second = "z_loss_weight" in content or content["vocab_size"] == SECOND_VOCABULARY
    rotary = content.get("max_position_embeddings") is not None
    length = content["max_position_embeddings"] if rotary else given_or(content, "model_max_length", 4096)
    kind = "rope" if rotary else "alibi"
    return {
        "norm_head": second,
        "position_embedding_type": kind,
        "max_position_embedding": length,
        **(read_rotary(path, content) if rotary else {}),
    }


def _write(model: ModelConfig) -> Content:
    rotary = model.position_embedding_type == "rope"
    length = "max_position_embeddings" if rotary else "model_max_length"
    second = {"z_loss_weight": 0} if model.norm_head else {}
    return {length: model.max_position_embedding, **second, **(write_rotary(model) if rotary else {})}


FAMILY = llama_like(
    "baichuan",
    "BaichuanForCausalLM",
    without=("n_kv_heads", "head_dim", "max_position_embedding"),
    weights=llama.llama_weights(LAYER),
    read=_read,
    write=_write,
)
