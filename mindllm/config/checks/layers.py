"""Cross checks of what layers are made of: latent attention, layers that predict ahead, projections in codes.

The keys of multi-head latent attention belong together, and those of ordinary attention do not go with it.

The rows of projections in codes, or the groups of their columns, must be divisible among the devices that share them. A
projection whose output is split is split by rows; one whose input is split is split by columns, and so by groups. An order of
columns (``desc_act``) reaches over all groups.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.quantization import CodeSpec
from mindllm.config.checks import MODEL, Finding
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

OF_LATENT = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_ORDINARY = (
    *("sliding_window", "layer_types", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("qkv_has_bias", "attn_proj_has_bias", "qk_layernorm"),
)
KEY: KeyPath = ("model", "model_config", "quantized_base")
SPLIT_BY_ROWS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
SPLIT_BY_COLUMNS = ("attention.wo", "feed_forward.w2")


def check_latent_attention(config: RunConfig) -> Iterator[Finding]:
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


def check_prediction(config: RunConfig) -> Iterator[Finding]:
    """Sequences that are long enough, and embeddings that can be looked up once more as they are."""
    model = config.model.config
    depths, pet = model.num_nextn_predict_layers, model.pet_config
    if not depths:
        return
    if config.is_preference_tuning:
        kind = config.train_dataset.data_loader.type
        message = (
            f"pairs of answers ({kind}) are learnt from without layers that predict ahead (value {depths}); write 0"
        )
        yield (*MODEL, "num_nextn_predict_layers"), message
    if depths >= model.seq_length:
        message = f"must be below seq_length {model.seq_length} (value {depths})"
        yield (*MODEL, "num_nextn_predict_layers"), message
    if model.embedding_dropout:
        message = f"layers that predict ahead have none (value {model.embedding_dropout}); write 0"
        yield (*MODEL, "embedding_dropout"), message
    if pet is not None and not pet.tuner.trains_mtp:
        message = f"models with layers that predict ahead are tuned as a whole (value {pet.pet_type})"
        message += "; write full, or num_nextn_predict_layers: 0"
        yield (*MODEL, "pet_config", "pet_type"), message
    if pet is not None and pet.neftune_noise_alpha is not None:
        message = f"layers that predict ahead have no noise (value {pet.neftune_noise_alpha}); write null"
        yield (*MODEL, "pet_config", "neftune_noise_alpha"), message


def check_codes(config: RunConfig) -> Iterator[Finding]:
    """Each kind of projection that tensor-parallel devices cannot divide."""
    parts = config.parallel_config.model_parallel
    if parts == 1 or config.model.config.quantization_config is None:
        return
    specs = {spec.module: spec for layer in config.model.config.architecture.specifications() for spec in layer.codes}
    for spec in specs.values():
        if problem := _problem(spec, parts):
            message = f"{spec.module} in codes {problem} (value {config.model.config.quantized_base})"
            yield KEY, f"{message}; write dequantize, or another model_parallel"


def _problem(spec: CodeSpec, parts: int) -> str:
    groups = spec.in_features // spec.group
    if spec.module in SPLIT_BY_ROWS:
        return ""
    if spec.module not in SPLIT_BY_COLUMNS:
        return "is not split over devices yet"
    if spec.ordered:
        return f"has columns in an order of their own (desc_act), which model_parallel {parts} does not divide"
    if groups % parts:
        return f"has {groups} groups of {spec.group} columns, which model_parallel {parts} does not divide"
    return ""
