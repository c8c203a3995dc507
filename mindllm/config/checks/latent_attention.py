"""Cross checks of multi-head latent attention: its keys belong together, and those of ordinary attention do not go with it."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

MODEL: KeyPath = ("model", "model_config")
OF_LATENT = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_ORDINARY = (
    *("sliding_window", "layer_types", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("qkv_has_bias", "attn_proj_has_bias", "qk_layernorm"),
)


def check_latent_attention(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Where ``kv_lora_rank`` is set, widths that fit; where it is not, no other key of latent attention."""
    model = config.model.config
    if model.kv_lora_rank is None:
        for key in OF_LATENT:
            if getattr(model, key) != type(model).model_fields[key].default:
                message = f"is a key of latent attention (value {getattr(model, key)}); write kv_lora_rank, too"
                yield (*MODEL, key), message
        return
    for key in OF_ORDINARY:
        if getattr(model, key):
            yield (*MODEL, key), f"latent attention has none (value {getattr(model, key)}); remove it, or kv_lora_rank"
    if model.position_embedding_type != "rope" or model.partial_rotary_factor != 1:
        key = "position_embedding_type" if model.position_embedding_type != "rope" else "partial_rotary_factor"
        message = f"latent attention turns qk_rope_head_dim channels (value {getattr(model, key)}); remove it"
        yield (*MODEL, key), message
    if model.n_kv_heads != model.num_heads:
        message = f"every head of latent attention has its own keys (value {model.n_kv_heads}); write {model.num_heads}"
        yield (*MODEL, "n_kv_heads"), message
    if model.qk_rope_head_dim % 2:
        yield (
            (*MODEL, "qk_rope_head_dim"),
            f"must be even, rotary positions turn pairs (value {model.qk_rope_head_dim})",
        )
    if model.v_head_dim > model.head_dim:
        message = f"must be at most {model.head_dim}, that of queries and keys (value {model.v_head_dim})"
        yield (*MODEL, "v_head_dim"), message
    width = model.qk_nope_head_dim + model.qk_rope_head_dim
    if model.head_dim != width:
        message = f"must be qk_nope_head_dim + qk_rope_head_dim {width} (value {model.head_dim}); leave it out"
        yield (*MODEL, "head_dim"), message
