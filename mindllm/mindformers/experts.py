"""Keys of experts and latent attention: the legacy section ``moe_config`` and the mcore names; and their translation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindllm.config.reading.document import path_of
from mindllm.mindformers.directory import has_mtp_layers
from mindllm.mindformers.reading import Reading, Rule, decided, shown

MODEL, LEGACY = "model.model_config", "moe_config"
TRAVEL = "token dispatch to experts; the result is the same"
KERNEL = "the kernel is chosen for the device; the result is the same"
WATCHES = "it only watches"
COUNT = (f"{MODEL}.num_experts", f"{MODEL}.n_routed_experts", f"{MODEL}.num_moe_experts", f"{LEGACY}.expert_num")
FACTORS = (f"{MODEL}.moe_aux_loss_coeff", f"{MODEL}.router_aux_loss_coef", f"{LEGACY}.aux_loss_factor")
KIND = f"{MODEL}.moe_router_load_balancing_type"
BALANCE = {"seq_aux_loss": "expert", "aux_loss": "switch", "gbs_aux_loss": "global", "global_aux_loss": "global"}
PREVIOUS_STEP = "choices are those of the global batch before; there, of the micro batches so far, in their order"
LOSSES = {"expert": "expert", "device": "device", "comm": "communication"}
SHARED = (f"{MODEL}.n_shared_experts", f"{MODEL}.shared_expert_num", f"{LEGACY}.shared_expert_num")
SYNONYMS = {  # ours: theirs
    "expert_num": COUNT,
    "num_experts_chosen": (
        *(f"{MODEL}.{name}" for name in ("num_experts_per_tok", "moe_router_topk")),
        f"{LEGACY}.num_experts_chosen",
    ),
    "moe_intermediate_size": (f"{MODEL}.moe_intermediate_size", f"{LEGACY}.moe_intermediate_size"),
    "norm_topk_prob": (f"{MODEL}.norm_topk_prob", f"{LEGACY}.norm_topk_prob"),
    "first_k_dense_replace": (f"{MODEL}.first_k_dense_replace", f"{LEGACY}.first_k_dense_replace"),
    "routed_scaling_factor": (f"{MODEL}.routed_scaling_factor", f"{LEGACY}.routed_scaling_factor"),
    "z_loss_factor": (f"{MODEL}.moe_z_loss_coeff", f"{LEGACY}.z_loss_factor"),
    "use_shared_expert_gating": (f"{LEGACY}.use_shared_expert_gating",),
    "use_gating_sigmoid": (f"{LEGACY}.use_gating_sigmoid",),
    "balance_via_topk_bias": (f"{MODEL}.moe_router_enable_expert_bias", f"{LEGACY}.balance_via_topk_bias"),
}
GROUPS = {
    "n_group": (f"{MODEL}.n_group", f"{LEGACY}.n_group"),
    "topk_group": (f"{MODEL}.topk_group", f"{MODEL}.moe_router_group_topk", f"{LEGACY}.topk_group"),
}
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MTP_KEYS = tuple(f"{MODEL}.{name}" for name in ("num_nextn_predict_layers", "mtp_num_layers", "mtp_depth"))


@dataclass(frozen=True)
class Fixed:
    """A key that has no effect with one of ``values`` (all, if there are none), for ``reason``, and is refused with others."""

    reason: str
    values: tuple[Any, ...] = ()


ONLY_FLOAT32 = Fixed("the router computes in float32", ("float32", None))
OFF = (False, None)
FIXED = {
    **{
        f"{MODEL}.{name}": Fixed(KERNEL)
        for name in (
            "moe_permute_fusion",
            "moe_router_fusion",
            "use_fused_mla",
            "use_fused_ops_topkrouter",
            "npu_nums_per_device",
        )
    },
    f"{MODEL}.moe_token_drop_policy": Fixed("no token is dropped without a capacity"),
    f"{MODEL}.moe_router_dtype": ONLY_FLOAT32,
    f"{MODEL}.router_dense_type": ONLY_FLOAT32,
    f"{MODEL}.moe_router_force_expert_balance": Fixed("experts are chosen by their scores", OFF),
    f"{MODEL}.moe_apply_probs_on_input": Fixed("weights multiply what experts return", OFF),
    f"{MODEL}.mla_qkv_concat": Fixed("it only joins weight matrices; the product is the same"),
    f"{LEGACY}.router_dense_type": ONLY_FLOAT32,
    f"{LEGACY}.expert_model_parallel": Fixed("experts are cut as the layers around them are", (1, None)),
    f"{LEGACY}.enable_cold_hot_expert": Fixed("experts stand on their devices", OFF),
    f"{LEGACY}.ep_extend_tp": Fixed(TRAVEL),
    **{f"{LEGACY}.{name}": Fixed(KERNEL) for name in ("use_fused_ops_topkrouter", "use_fused_ops_permute")},
    **{
        f"{LEGACY}.{name}": Fixed(TRAVEL)
        for name in (
            *("comp_comm_parallel", "comp_comm_parallel_degree", "enable_deredundency", "npu_nums_per_device"),
            *("expert_group_size", "group_wise_a2a", "use_allgather_dispatcher", "dispatch_global_max_bs"),
            *("moe_shared_expert_overlap", "enable_gmm_safe_tokens", "routing_policy", "max_router_load"),
        )
    },
    **{
        f"{LEGACY}.{name}": Fixed(WATCHES)
        for name in ("callback_moe_droprate", "save_token_distribution", "cur_layer", "moe_module_name")
    },
    **{
        f"{LEGACY}.{name}": Fixed("a part of enable_cold_hot_expert, which is off")
        for name in ("hot_expert_num", "cold_token_percent", "update_step")
    },
}
SCORES = (f"{MODEL}.moe_router_score_function", f"{MODEL}.scoring_func")
PRE_SOFTMAX = f"{MODEL}.moe_router_pre_softmax"
SHARED_WIDTH = f"{MODEL}.moe_shared_expert_intermediate_size"
RATES = (f"{MODEL}.moe_router_bias_update_rate", f"{LEGACY}.topk_bias_update_rate")
LISTED = (f"{LEGACY}.aux_loss_types", f"{LEGACY}.aux_loss_factors")
CAPACITY, DROPS = (f"{LEGACY}.{name}" for name in ("capacity_factor", "enable_sdrop"))
GROUPED = (f"{MODEL}.moe_grouped_gemm", f"{LEGACY}.use_gmm")
DISPATCHER = f"{MODEL}.moe_token_dispatcher_type"
SENDS = {  # theirs: how that differs from ours
    "alltoall": "",
    "alltoall_deredundency": "there a token goes to a node once; here to the rank of each of its experts",
    "alltoall_zero_redundancy": "there a token goes to a rank once; here for each of its experts",
}
METHOD = f"{LEGACY}.topk_method"
LATENT_SWITCH = f"{MODEL}.multi_latent_attention"
MTP_FACTORS = tuple(f"{MODEL}.{name}" for name in ("mtp_loss_scaling_factor", "mtp_loss_factor"))


def expert_keys() -> tuple[str, ...]:
    """Return every key about experts."""
    rows = (*SYNONYMS.values(), *GROUPS.values(), GROUPED, SHARED, FACTORS, SCORES, RATES, LISTED)
    single_keys = (KIND, PRE_SOFTMAX, SHARED_WIDTH, CAPACITY, DROPS, METHOD, DISPATCHER)
    return (*(key for row in rows for key in row), *single_keys, *FIXED)


def keys_below(section: str) -> dict[str, Rule]:
    """Return the rows of a key table for the expert keys of ``section``."""
    latent_keys = [f"{MODEL}.{name}" for name in LATENT] + [*MTP_KEYS, *MTP_FACTORS, LATENT_SWITCH]
    names = [key.removeprefix(f"{section}.") for key in (*expert_keys(), *latent_keys) if key.startswith(f"{section}.")]
    return {name: decided() for name in names}


GATHERED = (
    "gathered here: with layers that predict ahead in several chunks MindSpore 2.10 compiles no tokens that are sent"
)
GROUP_METHODS = ("group_limited_greedy", "noaux_tc")
DENSE = "the model has no experts"
EXPERT_PARALLEL = "parallel_config.expert_parallel"
EXPERT_TENSOR = "parallel_config.expert_model_parallel"


def translate_experts(reading: Reading) -> None:
    """Translate keys of experts and latent attention; without experts they have no effect."""
    if max(reading.number(key, 0) for key in COUNT) <= 1:
        for key in (*expert_keys(), EXPERT_PARALLEL, EXPERT_TENSOR):
            if reading.has(key) and not reading.claimed(path_of(key)):
                reading.idle(key, DENSE)
    else:
        for ours, keys in SYNONYMS.items():
            _first(reading, ours, keys)
        _shared(reading)
        _groups(reading)
        _scores(reading)
        _balance(reading)
        _capacity(reading)
        _devices(reading)
        _grouped(reading)
        # how sorted tokens travel: theirs are always sent to the ranks of their experts, those of legacy networks
        # (MoEV3), too; use_allgather_dispatcher is about experts with places
        written, ours = reading.has(DISPATCHER), f"{MODEL}.moe_token_dispatcher_type"
        kind = reading.word(DISPATCHER) or "alltoall"
        if not (_is_grouped(reading) and reading.get("use_parallel") and reading.count(EXPERT_PARALLEL) > 1):
            if written:
                reading.idle(DISPATCHER, TRAVEL)
        elif kind not in SENDS:
            reading.refuse(DISPATCHER, f"tokens are sent by {', '.join(SENDS)}")
        elif _has_mtp(reading) and reading.count(f"{MODEL}.pp_interleave_num") > 1:
            if written:
                reading.translate(DISPATCHER, ours, "allgather", GATHERED)
            else:
                reading.set_omitted(DISPATCHER, ours, "allgather", f"left out: {GATHERED}")
        elif written:
            reading.translate(DISPATCHER, ours, "alltoall", SENDS[kind])
        else:
            reading.set_omitted(DISPATCHER, ours, "alltoall", "left out: sorted tokens are sent to their experts")
        for key, fixed in FIXED.items():
            if reading.has(key):
                _fixed(reading, key, fixed)
    _latent_attention(reading)
    _prediction(reading)


def is_latent(reading: Reading) -> bool:
    """Return True if the network has latent attention."""
    return bool(reading.get(LATENT_SWITCH) or reading.get(f"{MODEL}.kv_lora_rank"))


def _devices(reading: Reading) -> None:
    """Translate how an expert is sharded.

    Legacy networks shard experts over ``model_parallel`` as mindllm does, but not with grouped GEMMs (``MoEV3``); mcore networks
    never do. In mindllm experts are not sharded either if the expert groups fill the tensor-parallel ranks.
    """
    if reading.has(EXPERT_PARALLEL):
        reading.use(EXPERT_PARALLEL)
    if reading.has(EXPERT_TENSOR):
        reading.use(EXPERT_TENSOR)
        return
    ranks = _tensor_ranks(reading)
    is_unsharded = _is_grouped(reading) or not reading.get("model.arch.type")
    if is_unsharded and ranks > 1 and reading.count(EXPERT_PARALLEL) % ranks == 0:
        reading.set_omitted(EXPERT_TENSOR, EXPERT_TENSOR, 1, "left out: an expert is whole on its device")


def _grouped(reading: Reading) -> None:
    """Translate grouped GEMMs, which require unsharded experts.

    A capacity for all tokens gives the same result at many times the cost.
    """
    for key in GROUPED:
        if not reading.get(key):
            if reading.has(key):
                reading.idle(key, KERNEL)
        elif reading.count(EXPERT_TENSOR) > 1:
            reading.refuse(key, f"an expert is whole on its device here; write --{EXPERT_TENSOR}=1")
        elif reading.count(EXPERT_PARALLEL) % _tensor_ranks(reading):
            advice = f"write --{EXPERT_PARALLEL}={_tensor_ranks(reading)}"
            reading.refuse(key, f"groups of experts fill the tensor-parallel ranks here; {advice}")
        else:
            reading.translate(key, f"{MODEL}.moe_grouped_gemm")


def _has_mtp(reading: Reading) -> bool:
    if any(map(reading.has, MTP_KEYS)):
        return any(reading.count(key, 0) for key in MTP_KEYS)
    return has_mtp_layers(reading)


def _is_grouped(reading: Reading) -> bool:
    return any(map(reading.get, GROUPED))


def _tensor_ranks(reading: Reading) -> int:
    return reading.count("parallel_config.model_parallel") if reading.get("use_parallel") else 1


def _first(reading: Reading, ours: str, keys: tuple[str, ...]) -> None:
    """Translate the first of several keys that has a value."""
    written = [key for key in keys if reading.has(key)]
    chosen = next((key for key in written if reading.get(key) is not None), None)
    for key in written:
        if key == chosen:
            reading.translate(key, f"{MODEL}.{ours}")
        elif reading.get(key) in (None, reading.get(chosen or key)):
            reading.idle(key, "empty" if reading.get(key) is None else f"{chosen} has the same meaning")
        else:
            reading.refuse(key, f"contradicts {chosen} {shown(reading.get(chosen or key))}")


def _fixed(reading: Reading, key: str, fixed: Fixed) -> None:
    if not fixed.values or reading.get(key) in fixed.values:
        reading.idle(key, fixed.reason)
    else:
        reading.refuse(key, f"{fixed.reason} here; write {shown(fixed.values[0])}")


def _shared(reading: Reading) -> None:
    """Translate shared experts into one expert of their total width, which computes the same sum."""
    if reading.get(SHARED_WIDTH):
        reading.use(SHARED_WIDTH)
    elif reading.has(SHARED_WIDTH):
        reading.idle(SHARED_WIDTH, "empty")
    widths = (*SYNONYMS["moe_intermediate_size"], f"{MODEL}.intermediate_size")
    width = next((reading.count(key) for key in widths if reading.number(key, 0) > 0), 1)
    for key in SHARED:
        if not reading.has(key):
            continue
        count = int(reading.number(key, 0))
        if count and not reading.get(SHARED_WIDTH):
            reading.translate(key, SHARED_WIDTH, count * width, "one as wide as all of them")
        else:
            reading.idle(key, f"{SHARED_WIDTH} says it" if count else "there is none")


def _groups(reading: Reading) -> None:
    """Translate expert groups; MindFormers writes 0 for no groups."""
    reason = _no_group_reason(reading)
    for ours, keys in GROUPS.items():
        for key in keys:
            if not reading.has(key):
                continue
            if reading.number(key, 0) > 0 and not reason:
                reading.translate(key, f"{MODEL}.{ours}")
            else:
                reading.idle(key, reason or "no groups are configured")
    if reading.has(METHOD):
        expected = "group_limited_greedy" if reading.get(METHOD) == "group_limited_greedy" else "greedy"
        _fixed(reading, METHOD, Fixed("groups and bias say how experts are chosen", (expected, None)))


def _no_group_reason(reading: Reading) -> str:
    """Return why MindFormers chooses experts without the groups that are written; empty where it uses them, or has none."""
    if reading.number(f"{LEGACY}.n_group", 0) > 1:
        method = reading.get(METHOD, "greedy")
        return "" if method in GROUP_METHODS else f"{METHOD} {shown(method)} chooses experts without groups"
    groups, chosen_groups = (
        next((reading.count(key) for key in keys if reading.number(key, 0) > 0), 1) for keys in GROUPS.values()
    )
    model = reading.ours.data.get("model", {}).get("model_config", {})
    experts, chosen = (
        value if isinstance(value := model.get(key), int) else 1 for key in ("expert_num", "num_experts_chosen")
    )
    if groups == 1 or (
        experts % groups == 0 and chosen_groups <= groups and chosen * groups <= chosen_groups * experts
    ):
        return ""
    reason = f"{chosen} of {experts} experts cannot be chosen from {chosen_groups} of {groups} groups"
    reading.warnings.append(
        f"n_group, topk_group: {reason}; they are chosen without groups, as in MindFormers' training"
    )
    return reason


def _scores(reading: Reading) -> None:
    """Translate router scores:

    sigmoid, or softmax over all logits. Softmax over the chosen logits equals their normalized softmax.
    """
    for key in SCORES:
        if not reading.has(key):
            continue
        if reading.get(key) in ("sigmoid", "softmax", None):
            reading.translate(key, f"{MODEL}.use_gating_sigmoid", reading.get(key) == "sigmoid")
        else:
            reading.refuse(key, "scores are sigmoid or softmax here")
    if not reading.has(PRE_SOFTMAX):
        return
    if any(reading.get(key) == "sigmoid" for key in SCORES):
        reading.idle(PRE_SOFTMAX, "scores are sigmoids")
    elif reading.get(PRE_SOFTMAX, True):
        reading.idle(PRE_SOFTMAX, "scores are a softmax of all logits")
    else:
        reading.translate(
            PRE_SOFTMAX, f"{MODEL}.norm_topk_prob", True, "a softmax of the chosen logits is that of all, renormalised"
        )


def _balance(reading: Reading) -> None:
    """Translate balance losses, and the bias that replaces them."""
    biased = any(reading.get(key) for key in SYNONYMS["balance_via_topk_bias"])
    for key in RATES:
        if reading.has(key) and biased:
            reading.translate(key, f"{MODEL}.topk_bias_update_rate")
        elif reading.has(key):
            reading.idle(key, "no bias is configured")
    types, factors = LISTED
    listed = reading.get(types)
    if listed and all(name in LOSSES for name in listed):
        reading.translate(types, f"{MODEL}.aux_loss_types", [LOSSES[name] for name in listed])
        if reading.has(factors):
            reading.translate(factors, f"{MODEL}.aux_loss_factors")
    elif listed:
        reading.refuse(types, f"losses are {', '.join(LOSSES)}")
    for key in (types, factors):
        if reading.has(key) and not reading.claimed(path_of(key)):
            reading.idle(key, "no loss of these kinds")
    # the keys that have one loss with one factor
    listed = bool(listed)
    written = [key for key in FACTORS if reading.has(key)]
    factor = next((key for key in written if reading.number(key, 0) > 0), None)
    kind = reading.word(KIND) or ("switch" if factor == FACTORS[-1] else "aux_loss")
    kind = BALANCE.get(kind, kind)
    if reading.has(KIND):
        if factor is None or kind == "none":
            reading.idle(KIND, "this loss is not configured")
        elif kind in BALANCE.values():
            reading.translate(KIND, f"{MODEL}.aux_loss_types", [kind], PREVIOUS_STEP if kind == "global" else "")
        else:
            reading.refuse(KIND, f"losses are {', '.join(BALANCE)}")
    for key in written:
        if key != factor or listed or kind == "none":
            reading.idle(key, "another key applies" if factor and kind != "none" else "this loss is not configured")
        else:
            reading.translate(key, f"{MODEL}.aux_loss_factors", [reading.get(key)])
            if not reading.has(KIND):
                reading.put(f"{MODEL}.aux_loss_types", [kind], path_of(key))


def _capacity(reading: Reading) -> None:
    if reading.has(DROPS):
        reading.idle(DROPS, "tokens beyond the capacity of an expert are dropped")
    if not reading.has(CAPACITY):
        return
    if _is_grouped(reading) or reading.number(CAPACITY, 0) <= 0:
        reading.idle(CAPACITY, "grouped products take all tokens")
    else:
        reading.translate(CAPACITY, f"{MODEL}.capacity_factor", reason="of the tokens of a sequence")


def _latent_attention(reading: Reading) -> None:
    latent = is_latent(reading)
    if reading.has(LATENT_SWITCH):
        reading.idle(LATENT_SWITCH, "kv_lora_rank applies" if latent else "attention is not latent")
    for name in LATENT:
        key = f"{MODEL}.{name}"
        if not reading.has(key):
            continue
        if latent and reading.get(key) is not None:
            reading.use(key)
        else:
            reading.idle(key, "empty" if latent else "attention is not latent")


def _prediction(reading: Reading) -> None:
    """Translate multi-token prediction layers and the factor of their loss."""
    if max(reading.number(key, 0) for key in MTP_KEYS) > 0:
        _first(reading, "num_nextn_predict_layers", MTP_KEYS)
        _first(reading, "mtp_loss_factor", MTP_FACTORS)
        return
    for key in (*MTP_KEYS, *MTP_FACTORS):
        if reading.has(key):
            reading.idle(key, "one token is predicted")
