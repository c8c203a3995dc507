"""Keys of MindFormers about experts and latent attention: the legacy section ``moe_config``, and the mcore names.

Both describe the same; a setting that the two name differently is one row here. ``experts.py`` translates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindllm.mindformers.keys.rules import Rule, decided

MODEL, LEGACY = "model.model_config", "moe_config"
TRAVEL = "how tokens travel to their experts; what is computed is the same"
KERNEL = "the kernel is chosen for the device; what it computes is the same"
WATCHES = "it only watches"
COUNT = (f"{MODEL}.num_experts", f"{MODEL}.n_routed_experts", f"{MODEL}.num_moe_experts", f"{LEGACY}.expert_num")
FACTORS = (f"{MODEL}.moe_aux_loss_coeff", f"{MODEL}.router_aux_loss_coef", f"{LEGACY}.aux_loss_factor")
KIND = f"{MODEL}.moe_router_load_balancing_type"
BALANCE = {"seq_aux_loss": "expert", "aux_loss": "switch", "gbs_aux_loss": "global", "global_aux_loss": "global"}
OF_STEP_BEFORE = "choices are those of the global batch before; there, of the micro batches so far, in their order"
LOSSES = {"expert": "expert", "device": "device", "comm": "communication"}
SHARED = (f"{MODEL}.n_shared_experts", f"{MODEL}.shared_expert_num", f"{LEGACY}.shared_expert_num")
SAME = {  # ours: theirs
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
AHEAD = tuple(f"{MODEL}.{name}" for name in ("num_nextn_predict_layers", "mtp_num_layers", "mtp_depth"))


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
AHEAD_FACTORS = tuple(f"{MODEL}.{name}" for name in ("mtp_loss_scaling_factor", "mtp_loss_factor"))


def expert_keys() -> tuple[str, ...]:
    """Every key that is about experts."""
    rows = (*SAME.values(), *GROUPS.values(), GROUPED, SHARED, FACTORS, SCORES, RATES, LISTED)
    alone = (KIND, PRE_SOFTMAX, SHARED_WIDTH, CAPACITY, DROPS, METHOD, DISPATCHER)
    return (*(key for row in rows for key in row), *alone, *FIXED)


def keys_below(section: str) -> dict[str, Rule]:
    """The rows of a key table for these keys of ``section``."""
    others = [f"{MODEL}.{name}" for name in LATENT] + [*AHEAD, *AHEAD_FACTORS, LATENT_SWITCH]
    names = [key.removeprefix(f"{section}.") for key in (*expert_keys(), *others) if key.startswith(f"{section}.")]
    return {name: decided() for name in names}
