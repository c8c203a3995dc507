"""Aquila 1 and 2 (BAAI, 2023): Llama in files of another name."""

from __future__ import annotations

from mindllm.families import llama
from mindllm.families.family import Family
from mindllm.families.rotary_keys import read_rotary, write_rotary

FAMILY = Family(
    name="aquila",
    network="AquilaForCausalLM",
    keys={key: value for key, value in llama.KEYS.items() if key != "head_dim"},
    weights=llama.WEIGHTS,
    only=llama.ONLY,
    written={"hidden_act": "silu"},
    read=read_rotary,
    write=write_rotary,
)
