"""Sizes beyond any machine: refused first, before anything is counted, listed or allocated by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindllm.config.checks import Finding
from mindllm.config.reading.document import KeyPath, at, dotted
from mindllm.config.run import RunConfig
from mindllm.errors import shortened

LIMITS = {
    "model.model_config.num_layers": 10_000,
    "model.model_config.num_nextn_predict_layers": 10_000,
    "model.model_config.hidden_size": 2**20,
    "model.model_config.intermediate_size": 2**22,
    "model.model_config.expert_num": 2**16,
    "model.model_config.moe_intermediate_size": 2**22,
    "model.model_config.num_heads": 2**16,
    "model.model_config.head_dim": 2**16,
    "model.model_config.q_lora_rank": 2**20,
    "model.model_config.kv_lora_rank": 2**20,
    "model.model_config.qk_nope_head_dim": 2**16,
    "model.model_config.qk_rope_head_dim": 2**16,
    "model.model_config.v_head_dim": 2**16,
    "model.model_config.vocab_size": 2**26,
    "model.model_config.seq_length": 2**26,
    "model.model_config.max_position_embedding": 2**26,
    "model.model_config.pp_interleave_num": 1024,
    "runner_config.batch_size": 2**20,
    "runner_config.gradient_accumulation_steps": 2**20,
    "parallel_config.data_parallel": 2**20,
    "parallel_config.model_parallel": 2**16,
    "parallel_config.expert_parallel": 2**16,
    "parallel_config.pipeline_stage": 10_000,
    "parallel_config.micro_batch_num": 2**16,
    "eval_dataset.batch_size": 2**20,
    "generation.max_new_tokens": 2**26,
    "generation.num_beams": 1024,
    "generation.num_return_sequences": 2**16,
    "predict_batch_size": 2**16,
}
"""The largest value of keys whose size decides memory and time, some times above any model or cluster there is."""


LARGEST_INTEGER = 2**63 - 1


def check_limits(config: RunConfig) -> Iterator[Finding]:
    """Yield every key that is above its limit, and every integer of more than 64 bits."""
    tree = config.model_dump(by_alias=True)
    for key, limit in LIMITS.items():
        path = tuple(key.split("."))
        value = at(tree, path)
        if isinstance(value, int) and value > limit:
            yield path, f"no machine has room for it (value {shortened(value)}); write at most {limit}"
    for place, value in _integers(tree, ()):
        if abs(value) > LARGEST_INTEGER and dotted(place) not in LIMITS:
            yield place, f"has more than 64 bits (value {shortened(value)}); write at most {LARGEST_INTEGER}"


def _integers(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """Yield the integers of a tree with the paths of their keys; those of a list have the path of the list."""
    if isinstance(tree, int) and not isinstance(tree, bool):
        yield path, tree
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from _integers(value, (*path, key))
    for value in tree if isinstance(tree, list | tuple) else ():
        yield from _integers(value, path)
