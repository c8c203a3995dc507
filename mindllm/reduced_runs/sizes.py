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
SHARE_OF_WINDOW = 4  # of the sequence is a window long


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
        "vocab_size": _alike(model.vocab_size, SMALLEST_VOCABULARY, devices),
        "seq_length": sequence,
        "max_position_embedding": sequence,
        **_of_positions(model, sequence, head_dim),
        **(_of_latent_attention(model, heads, hidden) if model.kv_lora_rank is not None else {}),
        **(_of_experts(model, hidden, devices) if model.expert_num > 1 else {}),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _of_positions(model: ModelConfig, sequence: int, head_dim: int) -> dict[str, Any]:
    """Windows shorter than the small sequence; pairs of channels that partial rotary positions can turn."""
    rotated = 2 * round(head_dim * model.partial_rotary_factor / 2)
    return {
        **({} if model.sliding_window is None else {"sliding_window": sequence // SHARE_OF_WINDOW}),
        **({} if model.partial_rotary_factor == 1 else {"partial_rotary_factor": rotated / head_dim}),
    }


def _of_latent_attention(model: ModelConfig, heads: int, hidden: int) -> dict[str, Any]:
    """Narrow vectors and heads whose parts have other widths, as the real ones have."""
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


def _of_experts(model: ModelConfig, hidden: int, devices: int) -> dict[str, Any]:
    """A few experts, shared by devices as the real ones are, two groups of them where there are groups, and narrow ones."""
    narrow, shared = model.moe_intermediate_size, model.moe_shared_expert_intermediate_size
    groups = min(model.n_group, FEW_GROUPS)
    number = next(
        count
        for count in itertools.count(FEW_EXPERTS)
        if count % groups == 0 and math.gcd(count, devices) == math.gcd(model.expert_num, devices)
    )
    as_dense = narrow == model.intermediate_size
    width = _inner_width(model, hidden, devices) if as_dense else _alike(narrow, hidden // 2, devices)
    return {
        "expert_num": number,
        "num_experts_chosen": min(model.num_experts_chosen, FEW_CHOSEN),
        "n_group": groups,
        "topk_group": groups if model.topk_group == model.n_group else 1,
        "moe_intermediate_size": width,
        **({} if shared is None else {"moe_shared_expert_intermediate_size": _alike(shared, hidden // 2, devices)}),
    }


def _widths(heads: int, hidden_size: int, devices: int) -> tuple[int, int]:
    """Width of a head and of the hidden states, the latter as divisible by ``devices`` as ``hidden_size`` is."""
    wanted = math.gcd(hidden_size, devices)
    head_dim = next(
        (
            width
            for width in range(SMALLEST_HEAD, SMALLEST_HEAD + 2 * devices + 2, 2)
            if math.gcd(heads * width, devices) == wanted
        ),
        SMALLEST_HEAD,
    )
    return head_dim, heads * head_dim


def _inner_width(model: ModelConfig, hidden: int, devices: int) -> int:
    """Width of the feed-forward: four times the hidden states' where it is that (families that say no width have no other)."""
    if model.intermediate_size == 4 * model.hidden_size:
        return 4 * hidden
    return _alike(model.intermediate_size, hidden + hidden // 2, devices)


def _alike(size: int, smallest: int, devices: int) -> int:
    """The smallest number from ``smallest`` on that has the same divisors in common with ``devices`` as ``size``."""
    wanted = math.gcd(size, devices)
    return next(number for number in itertools.count(smallest) if math.gcd(number, devices) == wanted)


def _multiple(smallest: int, of: int) -> int:
    return math.ceil(smallest / of) * of
