"""Cross checks of layers: heads, windows, latent attention, experts, multi-token prediction, quantized weights."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.quantization import CodeSpec
from mindllm.axes import CONTEXT, STAGE_AXES, TENSOR
from mindllm.config.checks import MESH, MODEL, Finding
from mindllm.config.model import expert_layers
from mindllm.config.model_keys import llama_intermediate_size
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

LONGEST_COMPOSED = 2**15  # tokens: 4 GiB in fp32 for the mask, and for the scores of each head


def check_heads(config: RunConfig) -> Iterator[Finding]:
    """Check the widths of heads and of the feed-forward."""
    model = config.model.config
    if model.kv_lora_rank is None and "head_dim" not in model.model_fields_set and model.hidden_size % model.num_heads:
        message = (
            f"does not divide hidden_size {model.hidden_size} (value {model.num_heads}); write another, or head_dim"
        )
        yield (*MODEL, "num_heads"), message
    elif model.kv_lora_rank is None and model.head_dim % 2:
        yield (*MODEL, "head_dim"), f"must be even, rotary positions turn pairs (value {model.head_dim})"
    if model.num_heads % model.n_kv_heads:
        message = f"must divide num_heads {model.num_heads} (value {model.n_kv_heads})"
        yield (*MODEL, "n_kv_heads"), message
    if model.ffn_dim_multiplier is not None:
        width = llama_intermediate_size(model.hidden_size, model.multiple_of, model.ffn_dim_multiplier)
        if width != model.intermediate_size:
            message = f"ffn_dim_multiplier {model.ffn_dim_multiplier} gives {width} (value {model.intermediate_size})"
            yield (*MODEL, "intermediate_size"), f"{message}; remove one of the two"


def check_layers(config: RunConfig) -> Iterator[Finding]:
    """Check the keys of single layers, and attention without a fused kernel."""
    model = config.model.config
    types = model.layer_types
    if types is not None and len(types) not in (model.num_layers, model.placed_layers):
        message = f"must hold {model.num_layers} entries, one for each layer (num_layers), not {len(types)}"
        yield (*MODEL, "layer_types"), message
    if model.sliding_window is None:
        for key in ("sliding_window_pattern", "rope_local_base_freq"):
            if getattr(model, key) is not None:
                yield (
                    (*MODEL, key),
                    f"is about layers with a window (value {getattr(model, key)}); write sliding_window",
                )
        if types is not None and "sliding_attention" in types:
            yield (*MODEL, "layer_types"), "has layers with a window; write sliding_window, too"
    fused = all(spec.attention.can_be_fused for spec in model.architecture.specifications())
    if model.use_flash_attention is True and not fused:
        message = "the kernel has no soft cap and takes ALiBi in a form that is not used (value true); write auto"
        yield (*MODEL, "use_flash_attention"), message
    composed = not fused or model.use_flash_attention is False
    if composed and config.context.device_target != "CPU" and model.seq_length > LONGEST_COMPOSED:
        size = f"{model.seq_length**2 * 4 / 2**30:,.0f} GB"
        reason = "composed attention (ALiBi, soft caps, dropout, use_flash_attention: false) has a mask and scores of"
        message = f"{reason} [seq, seq], {size} each (value {model.seq_length}); write at most {LONGEST_COMPOSED}"
        yield (*MODEL, "seq_length"), message


def check_sequence(config: RunConfig) -> Iterator[Finding]:
    """Check the sequence length against the maximum context and the chunks of the loss."""
    model = config.model.config
    if model.seq_length > model.max_position_embedding:
        message = f"above max_position_embedding {model.max_position_embedding} (value {model.seq_length})"
        yield (*MODEL, "seq_length"), message
    if model.seq_length % model.loss_chunks:
        message = f"must divide seq_length {model.seq_length} (value {model.loss_chunks})"
        yield (*MODEL, "loss_chunks"), message
    scaling = model.rope_scaling
    if scaling is not None and scaling.type == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        message = f"must be above low_freq_factor {scaling.low_freq_factor} (value {scaling.high_freq_factor})"
        yield (*MODEL, "rope_scaling", "high_freq_factor"), message


def check_experts(config: RunConfig) -> Iterator[Finding]:
    """Check the keys of experts; for a dense model, that experts are not configured."""
    model, sizes = config.model.config, config.parallel_config
    if model.expert_num == 1:
        if sizes.expert_parallel > 1:
            yield (*MESH, "expert_parallel"), f"the model has no experts (value {sizes.expert_parallel}); write 1"
        return
    yield from _layers(config)
    yield from _routing(config)
    yield from _balance(config)
    yield from _devices(config)
    if model.moe_grouped_gemm:
        yield from _grouped(config)
    if model.moe_token_dispatcher_type == "alltoall":
        yield from _sent(config)


def _layers(config: RunConfig) -> Iterator[Finding]:
    model = config.model.config
    listed = model.moe_layer_freq
    if not isinstance(listed, int) and len(listed) not in (model.num_layers, model.placed_layers):
        message = f"must hold {model.num_layers} entries, one for each layer (num_layers), not {len(listed)}"
        yield (*MODEL, "moe_layer_freq"), message
    elif (
        isinstance(listed, int) and model.kv_lora_rank is None and not any(expert_layers(model))
    ):  # reduced runs with dense layers only have a list; DeepSeek models have experts by their family
        first = model.first_k_dense_replace
        yield (*MODEL, "first_k_dense_replace"), f"no layer has experts (value {first}); write expert_num: 1"
    biased = next((key for key in ("mlp_has_bias", "mlp_proj_has_bias") if getattr(model, key)), None)
    if not model.gated_linear_unit or biased:
        key = biased or "gated_linear_unit"
        yield (*MODEL, key), f"experts are gated and have no bias (value {getattr(model, key)})"
    if model.use_shared_expert_gating and model.moe_shared_expert_intermediate_size is None:
        message = "requires moe_shared_expert_intermediate_size (value True)"
        yield (*MODEL, "use_shared_expert_gating"), message


def _routing(config: RunConfig) -> Iterator[Finding]:
    model = config.model.config
    experts, chosen, groups = model.expert_num, model.num_experts_chosen, model.n_group
    if chosen > experts:
        yield (*MODEL, "num_experts_chosen"), f"there are only {experts} experts, expert_num (value {chosen})"
        return
    if experts % groups:
        yield (*MODEL, "n_group"), f"must divide expert_num {experts} (value {groups})"
        return
    if model.topk_group > groups:
        yield (*MODEL, "topk_group"), f"there are only {groups} groups, n_group (value {model.topk_group})"
        return
    within = model.topk_group * (experts // groups)
    if chosen > within:
        message = f"topk_group {model.topk_group} of {groups} groups hold only {within} experts (value {chosen})"
        yield (*MODEL, "num_experts_chosen"), message
    if groups > 1 and model.balance_via_topk_bias and experts // groups < 2:
        yield (*MODEL, "n_group"), f"a group is as good as its two best experts and has only one (value {groups})"


def _balance(config: RunConfig) -> Iterator[Finding]:
    model = config.model.config
    types, factors = model.aux_loss_types, model.aux_loss_factors
    if len(types) != len(factors):
        message = f"must hold a factor for each of aux_loss_types, {len(types)}, not {len(factors)}"
        yield (*MODEL, "aux_loss_factors"), message
    if len({*types}) != len(types):
        yield (*MODEL, "aux_loss_types"), f"names a loss twice (value {', '.join(types)})"
    group_losses = [kind for kind in types if kind in ("device", "communication")]
    if group_losses and model.n_group == 1:
        message = f"is about groups of experts (value {group_losses[0]}); write n_group, too"
        yield (*MODEL, "aux_loss_types"), message
    for factor in factors:
        if factor < 0:
            yield (*MODEL, "aux_loss_factors"), f"must not be negative (value {factor})"
    if model.topk_bias_update_rate and not model.balance_via_topk_bias:
        message = f"requires balance_via_topk_bias: true (value {model.topk_bias_update_rate})"
        yield (*MODEL, "topk_bias_update_rate"), message


def _devices(config: RunConfig) -> Iterator[Finding]:
    model, sizes = config.model.config, config.parallel_config
    groups, tensor = sizes.expert_parallel, sizes.expert_tensor_parallel
    if model.expert_num % groups:
        message = f"must divide expert_num {model.expert_num} (value {groups})"
        yield (*MESH, "expert_parallel"), message
    if sizes.model_parallel % tensor:
        message = f"must divide model_parallel {sizes.model_parallel} (value {tensor})"
        yield (*MESH, "expert_model_parallel"), message
        return
    devices = sizes.stage_device_num
    # capacity is per sequence, so an expert group spans the ranks of a sequence; sorted tokens have no such limit
    spanned = sizes.size(TENSOR) * (1 if model.moe_grouped_gemm else sizes.size(CONTEXT))
    if devices % (groups * tensor) or groups * tensor % spanned:
        possible = [
            number
            for number in range(1, devices // tensor + 1)
            if devices % (number * tensor) == 0 and number * tensor % spanned == 0 and model.expert_num % number == 0
        ]
        advice = f"; write {' or '.join(map(str, possible))}" if possible else ""
        message = f"{groups} groups of {tensor} ranks do not fill {sizes.sizes_text(STAGE_AXES)} evenly (value {groups}){advice}"
        yield (*MESH, "expert_parallel"), message
    if model.moe_intermediate_size % tensor:
        message = f"is not divisible by the {tensor} ranks of an expert (value {model.moe_intermediate_size})"
        yield (*MODEL, "moe_intermediate_size"), message
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % sizes.model_parallel:
        message = f"is not divisible by parallel_config.model_parallel {sizes.model_parallel} (value {shared})"
        yield (*MODEL, "moe_shared_expert_intermediate_size"), message


def _grouped(config: RunConfig) -> Iterator[Finding]:
    """Check the limits of grouped expert GEMMs."""
    model, sizes = config.model.config, config.parallel_config
    if model.capacity_factor is not None:
        message = f"products of sorted tokens have no capacity (value {model.capacity_factor}); write null"
        yield (*MODEL, "capacity_factor"), message
    if sizes.expert_tensor_parallel > 1:
        message = (
            f"experts of moe_grouped_gemm are whole on their devices (value {sizes.expert_tensor_parallel}); write 1"
        )
        yield (*MESH, "expert_model_parallel"), message
    # limits of MindSpore's compiler with gradient accumulation
    parts, sizes = config.runner_config.gradient_accumulation_steps, config.parallel_config
    unreplicated = sizes.expert_parallel == sizes.stage_device_num > 1
    if parts > 1 and unreplicated and config.parallel.enable_parallel_optimizer:
        message = (
            "gradients of sorted experts without replicas get no shape from MindSpore 2.10 where a parallel optimizer takes a "
            f"batch in parts (value {parts}); write 1, parallel.enable_parallel_optimizer: false, or a smaller expert_parallel"
        )
        yield ("runner_config", "gradient_accumulation_steps"), message


def _sent(config: RunConfig) -> Iterator[Finding]:
    """Check the requirements of token dispatch by AlltoAllV.

    It needs sorted tokens, operators of Ascend, and SiLU, the only activation whose gradient works with dynamic shapes.
    """
    model, key = config.model.config, (*MODEL, "moe_token_dispatcher_type")
    if not model.moe_grouped_gemm:
        yield key, "sends sorted tokens (value alltoall); write moe_grouped_gemm: true, too, or allgather"
    if not config.sends_tokens:
        return
    if model.hidden_act != "silu":
        yield (
            key,
            f"sends tokens to experts with hidden_act silu only, not {model.hidden_act} (value alltoall); write allgather",
        )
    if config.context.device_target == "CPU":
        message = "needs operators of Ascend (value alltoall); write allgather, whose results are the same"
        yield key, message
    if model.num_nextn_predict_layers and model.pp_interleave_num > 1 and config.recompute_config.recompute:
        message = (
            "fails to compile in MindSpore 2.10 with multi-token prediction, several chunks and recomputation (value "
            "alltoall: Illegal AnfNode for evaluating); write allgather, whose results are the same"
        )
        yield key, message


LATENT_KEYS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ORDINARY_KEYS = (
    *("sliding_window", "layer_types", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("qkv_has_bias", "attn_proj_has_bias", "qk_layernorm"),
)
KEY: KeyPath = ("model", "model_config", "quantized_base")
SPLIT_BY_ROWS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
SPLIT_BY_COLUMNS = ("attention.wo", "feed_forward.w2")


def check_latent_attention(config: RunConfig) -> Iterator[Finding]:
    """Check the widths of latent attention; without ``kv_lora_rank``, that its other keys are not set."""
    model = config.model.config
    if model.kv_lora_rank is None:
        for key in LATENT_KEYS:
            if getattr(model, key) != type(model).model_fields[key].default:
                message = f"is a key of latent attention (value {getattr(model, key)}); write kv_lora_rank, too"
                yield (*MODEL, key), message
        return
    for key in ORDINARY_KEYS:
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
    """Check multi-token prediction: sequence length, embeddings and tuning."""
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
    """Check that tensor parallelism can divide quantized projections."""
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
        return f"has reordered columns (desc_act), which model_parallel {parts} does not divide"
    if groups % parts:
        return f"has {groups} groups of {spec.group} columns, which model_parallel {parts} does not divide"
    return ""
