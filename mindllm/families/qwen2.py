"""Qwen 1.5, 2 and 2.5 (Yang et al., 2024): Llama with a bias on query, key and value."""

from __future__ import annotations

from mindllm.families import llama
from mindllm.families.family import Family
from mindllm.families.rotary_keys import read_rotary, write_rotary
from mindllm.families.windows import read_last_layers, write_last_layers

FAMILY = Family(
    name="qwen2",
    network="Qwen2ForCausalLM",
    keys={**llama.KEYS, "max_position_embedding": ("max_position_embeddings", 32768)},
    weights=llama.WEIGHTS,
    fixed={"qkv_has_bias": True},
    only=llama.ONLY,
    written={"hidden_act": "silu"},
    read=lambda path, content: {**read_last_layers(content), **read_rotary(path, content)},
    write=lambda model: {**write_last_layers(model), **write_rotary(model)},
)
