"""Smaller sizes: values of the keys of a model that are widths, lengths and numbers of experts.

They have in common with the number of devices what the real ones have, so the compiler shards them alike. Queries stay grouped,
groups of experts stay several, and widths that are equal or a multiple of another stay so.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from mindllm.axes import CONTEXT
from mindllm.config import ModelConfig, RunConfig

SMALLEST_HEADS = 4
SMALLEST_HEAD = 16
SMALLEST_VOCABULARY = 96
SMALLEST_SEQUENCE = 32
FEW_EXPERTS, FEW_CHOSEN, FEW_GROUPS = 4, 2, 2
WINDOW_FRACTION = 4  # a window is the sequence divided by this


def reduced_sizes(config: RunConfig) -> dict[str, Any]:
    """Return small values of the keys of ``model_config`` that are widths or lengths."""
    model, sizes = config.model.config, config.parallel_config
    tensor, devices = sizes.model_parallel, sizes.stage_device_num
    sharing = min(2, model.num_heads // model.n_kv_heads)
    kv_heads = _multiple(SMALLEST_HEADS // sharing, tensor * (sizes.size(CONTEXT) if sizes.exchanges_heads else 1))
    heads = kv_heads * sharing
    head_dim, hidden = _widths(heads, model.hidden_size, devices)
    parts = math.lcm(model.loss_chunks, 2, tensor) * sizes.size(CONTEXT) * sizes.seq_split_num
    sequence = _multiple(SMALLEST_SEQUENCE, parts)
    return {
        "num_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "ffn_dim_multiplier": None,
        "intermediate_size": _inner_width(model, hidden, devices),
        "vocab_size": _equally_divisible(model.vocab_size, SMALLEST_VOCABULARY, devices),
        "seq_length": sequence,
        "max_position_embedding": sequence,
        **_position_sizes(model, sequence, head_dim),
        **(_latent_attention_sizes(model, heads, hidden) if model.kv_lora_rank is not None else {}),
        **(_expert_sizes(model, hidden, devices) if model.expert_num > 1 else {}),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _position_sizes(model: ModelConfig, sequence: int, head_dim: int) -> dict[str, Any]:
    """Return windows shorter than the small sequence, and channel pairs that partial rotary positions can rotate."""
    rotated = 2 * round(head_dim * model.partial_rotary_factor / 2)
    return {
        **({} if model.sliding_window is None else {"sliding_window": sequence // WINDOW_FRACTION}),
        **({} if model.partial_rotary_factor == 1 else {"partial_rotary_factor": rotated / head_dim}),
    }


def _latent_attention_sizes(model: ModelConfig, heads: int, hidden: int) -> dict[str, Any]:
    """Return narrow vectors and heads whose parts have different widths, as in the real model."""
    plain, turned = SMALLEST_HEAD - SMALLEST_HEAD // 4, SMALLEST_HEAD // 2
    return {
        "n_kv_heads": heads,
        "head_dim": plain + turned,
        "q_lora_rank": None if model.q_lora_rank is None else hidden // 2,
        "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": turned,
        "v_head_dim": plain if model.v_head_dim == model.qk_nope_head_dim else plain - 2,
    }


def _expert_sizes(model: ModelConfig, hidden: int, devices: int) -> dict[str, Any]:
    """Return a few narrow experts, shared by devices as the real ones, with two groups if there are groups."""
    narrow, shared = model.moe_intermediate_size, model.moe_shared_expert_intermediate_size
    groups = min(model.n_group, FEW_GROUPS)
    number = next(
        count
        for count in itertools.count(FEW_EXPERTS)
        if count % groups == 0 and math.gcd(count, devices) == math.gcd(model.expert_num, devices)
    )
    dense_width = narrow == model.intermediate_size
    width = _inner_width(model, hidden, devices) if dense_width else _equally_divisible(narrow, hidden // 2, devices)
    return {
        "expert_num": number,
        "num_experts_chosen": min(model.num_experts_chosen, FEW_CHOSEN),
        "n_group": groups,
        "topk_group": groups if model.topk_group == model.n_group else 1,
        "moe_intermediate_size": width,
        **(
            {}
            if shared is None
            else {"moe_shared_expert_intermediate_size": _equally_divisible(shared, hidden // 2, devices)}
        ),
    }


def _widths(heads: int, hidden_size: int, devices: int) -> tuple[int, int]:
    """Return the width of a head and of the hidden states, the latter as divisible by ``devices`` as ``hidden_size``."""
    divisor = math.gcd(hidden_size, devices)
    head_dim = next(
        (
            width
            for width in range(SMALLEST_HEAD, SMALLEST_HEAD + 2 * devices + 2, 2)
            if math.gcd(heads * width, devices) == divisor
        ),
        SMALLEST_HEAD,
    )
    return head_dim, heads * head_dim


def _inner_width(model: ModelConfig, hidden: int, devices: int) -> int:
    """Return the width of the feed-forward; four times the hidden size if it is so in the real model."""
    if model.intermediate_size == 4 * model.hidden_size:
        return 4 * hidden
    return _equally_divisible(model.intermediate_size, hidden + hidden // 2, devices)


def _equally_divisible(size: int, smallest: int, devices: int) -> int:
    """Return the smallest number from ``smallest`` on that shares the same divisors with ``devices`` as ``size``."""
    divisor = math.gcd(size, devices)
    return next(number for number in itertools.count(smallest) if math.gcd(number, devices) == divisor)


def _multiple(smallest: int, factor: int) -> int:
    return math.ceil(smallest / factor) * factor
