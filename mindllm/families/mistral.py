"""Mistral 7B (Jiang et al., 2023): Llama with a sliding window in every layer; openbuddy-zephyr, which is trained on from it."""

from __future__ import annotations

from mindllm.families import llama
from mindllm.families.family import Family
from mindllm.families.rotary_keys import read_rotary, write_rotary

WINDOW = 4096  # where the file does not say

FAMILY = Family(
    name="mistral",
    network="MistralForCausalLM",
    keys={**llama.KEYS, "max_position_embedding": ("max_position_embeddings", 32 * WINDOW)},
    weights=llama.WEIGHTS,
    only=llama.ONLY,
    written={"hidden_act": "silu"},
    read=lambda path, content: {
        "sliding_window": content.get("sliding_window", WINDOW),
        **read_rotary(path, content),
    },
    write=lambda model: {"sliding_window": model.sliding_window, **write_rotary(model)},
)
