"""Cross checks of mixtures of experts: what routes, what is shared between devices."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.axes import CONTEXT, STAGE_AXES, TENSOR
from mindllm.config.checks import MESH, MODEL, Finding
from mindllm.config.decoder.architecture import expert_layers
from mindllm.config.run import RunConfig


def check_experts(config: RunConfig) -> Iterator[Finding]:
    """Everything about experts; for a dense model, that nothing asks for them."""
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
    ):  # a list says it: small runs of dense layers have one; so does the family with latent attention, which names experts
        first = model.first_k_dense_replace
        yield (*MODEL, "first_k_dense_replace"), f"no layer has experts (value {first}); write expert_num: 1"
    biased = next((key for key in ("mlp_has_bias", "mlp_proj_has_bias") if getattr(model, key)), None)
    if not model.gated_linear_unit or biased:
        key = biased or "gated_linear_unit"
        yield (*MODEL, key), f"experts are gated and have no bias (value {getattr(model, key)})"
    if model.use_shared_expert_gating and model.moe_shared_expert_intermediate_size is None:
        message = "there is no shared expert (value True); write moe_shared_expert_intermediate_size, too"
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
    of_groups = [kind for kind in types if kind in ("device", "communication")]
    if of_groups and model.n_group == 1:
        message = f"is about groups of experts (value {of_groups[0]}); write n_group, too"
        yield (*MODEL, "aux_loss_types"), message
    for factor in factors:
        if factor < 0:
            yield (*MODEL, "aux_loss_factors"), f"must not be negative (value {factor})"
    if model.topk_bias_update_rate and not model.balance_via_topk_bias:
        message = f"there is no bias (value {model.topk_bias_update_rate}); write balance_via_topk_bias: true, too"
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
    # Places are those of whole sequences, of which a group of experts takes some; sorted tokens are of no sequence.
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
    """What experts without places cannot do."""
    model, sizes = config.model.config, config.parallel_config
    if model.capacity_factor is not None:
        message = f"products of sorted tokens have no capacity (value {model.capacity_factor}); write null"
        yield (*MODEL, "capacity_factor"), message
    if sizes.expert_tensor_parallel > 1:
        message = (
            f"experts of moe_grouped_gemm are whole on their devices (value {sizes.expert_tensor_parallel}); write 1"
        )
        yield (*MESH, "expert_model_parallel"), message
    yield from _in_parts(config)


def _in_parts(config: RunConfig) -> Iterator[Finding]:
    """What MindSpore's compiler cannot do where each part of a batch is compiled for itself."""
    parts, sizes = config.runner_config.gradient_accumulation_steps, config.parallel_config
    alone = sizes.expert_parallel == sizes.stage_device_num > 1
    if parts > 1 and alone and config.parallel.enable_parallel_optimizer:
        message = (
            "gradients of sorted experts without replicas get no shape from MindSpore 2.10 where a parallel optimizer takes a "
            f"batch in parts (value {parts}); write 1, parallel.enable_parallel_optimizer: false, or a smaller expert_parallel"
        )
        yield ("runner_config", "gradient_accumulation_steps"), message


def _sent(config: RunConfig) -> Iterator[Finding]:
    """What tokens that are sent in lengths need: an order, Ascend's operators, and the one activation whose gradient asks for no
    shape.
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
            "is not compiled by MindSpore 2.10 beside layers that predict ahead, several chunks and recomputed layers (value "
            "alltoall: Illegal AnfNode for evaluating); write allgather, whose results are the same"
        )
        yield key, message
