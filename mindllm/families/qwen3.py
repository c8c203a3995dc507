"""Qwen 3, dense (Yang et al., 2025): Llama with a norm on every head of queries and keys."""

from __future__ import annotations

from mindllm.families import llama
from mindllm.families.family import Family
from mindllm.families.rotary_keys import read_rotary, write_rotary
from mindllm.families.windows import read_last_layers, write_last_layers

FAMILY = Family(
    name="qwen3",
    network="Qwen3ForCausalLM",
    keys={
        **llama.KEYS,
        "head_dim": ("head_dim", 128),
        "max_position_embedding": ("max_position_embeddings", 32768),
    },
    weights=llama.WEIGHTS,
    fixed={"qk_layernorm": True},
    only={**llama.ONLY, "attention_bias": (False,)},
    written={"hidden_act": "silu", "attention_bias": False},
    read=lambda path, content: {**read_last_layers(content), **read_rotary(path, content)},
    write=lambda model: {**write_last_layers(model), **write_rotary(model)},
)
