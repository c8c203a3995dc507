"""Experts and latent attention of a YAML of MindFormers, from either set of names (``keys/experts.py``), to our flat keys."""

from __future__ import annotations

from mindllm.config.reading.document import path_of
from mindllm.mindformers.directory import predicts_ahead
from mindllm.mindformers.keys.experts import (
    AHEAD,
    AHEAD_FACTORS,
    BALANCE,
    CAPACITY,
    COUNT,
    DISPATCHER,
    DROPS,
    FACTORS,
    FIXED,
    GROUPED,
    GROUPS,
    KERNEL,
    KIND,
    LATENT,
    LATENT_SWITCH,
    LEGACY,
    LISTED,
    LOSSES,
    METHOD,
    MODEL,
    OF_STEP_BEFORE,
    PRE_SOFTMAX,
    RATES,
    SAME,
    SCORES,
    SENDS,
    SHARED,
    SHARED_WIDTH,
    TRAVEL,
    Fixed,
    expert_keys,
)
from mindllm.mindformers.reading import Reading, shown

GATHERED = (
    "gathered here: with layers that predict ahead in several chunks MindSpore 2.10 compiles no tokens that are sent"
)
GROUP_METHODS = ("group_limited_greedy", "noaux_tc")
NO_EXPERTS = "there are no experts"
EXPERT_PARALLEL = "parallel_config.expert_parallel"
EXPERT_TENSOR = "parallel_config.expert_model_parallel"


def translate_experts(reading: Reading) -> None:
    """Writes our keys of experts and of latent attention; where there are neither, theirs are without effect."""
    if max(reading.number(key, 0) for key in COUNT) <= 1:
        for key in (*expert_keys(), EXPERT_PARALLEL, EXPERT_TENSOR):
            if reading.has(key) and not reading.claimed(path_of(key)):
                reading.idle(key, NO_EXPERTS)
    else:
        _experts(reading)
    _latent_attention(reading)
    _prediction(reading)


def is_latent(reading: Reading) -> bool:
    """Whether attention is latent."""
    return bool(reading.get(LATENT_SWITCH) or reading.get(f"{MODEL}.kv_lora_rank"))


def _experts(reading: Reading) -> None:
    for ours, keys in SAME.items():
        _first(reading, ours, keys)
    _shared(reading)
    _groups(reading)
    _scores(reading)
    _balance(reading)
    _capacity(reading)
    _devices(reading)
    _grouped(reading)
    _dispatcher(reading)
    for key, fixed in FIXED.items():
        if reading.has(key):
            _fixed(reading, key, fixed)


def _devices(reading: Reading) -> None:
    """How an expert is split over devices.

    Legacy networks split it over ``model_parallel`` as we do, but not with grouped products (``MoEV3``), and those of mcore never
    do. Here an expert is whole, too, where the groups of experts fill the tensor-parallel ranks.
    """
    if reading.has(EXPERT_PARALLEL):
        reading.use(EXPERT_PARALLEL)
    if reading.has(EXPERT_TENSOR):
        reading.use(EXPERT_TENSOR)
        return
    ranks = _tensor_ranks(reading)
    whole = _is_grouped(reading) or not reading.get("model.arch.type")
    if whole and ranks > 1 and reading.count(EXPERT_PARALLEL) % ranks == 0:
        reading.left_out(EXPERT_TENSOR, EXPERT_TENSOR, 1, "left out: an expert is whole on its device")


def _grouped(reading: Reading) -> None:
    """Products of sorted tokens. They want whole experts: room for all tokens in each would be the same numbers, at many times
    the cost."""
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


def _dispatcher(reading: Reading) -> None:
    """How sorted tokens travel: theirs are always sent to the ranks of their experts, those of legacy networks (``MoEV3``), too;
    ``use_allgather_dispatcher`` is about experts with places.
    """
    written, ours = reading.has(DISPATCHER), f"{MODEL}.moe_token_dispatcher_type"
    kind = reading.word(DISPATCHER) or "alltoall"
    if not (_is_grouped(reading) and reading.get("use_parallel") and reading.count(EXPERT_PARALLEL) > 1):
        if written:
            reading.idle(DISPATCHER, TRAVEL)
    elif kind not in SENDS:
        reading.refuse(DISPATCHER, f"tokens are sent by {', '.join(SENDS)}")
    elif _predicts_ahead(reading) and reading.count(f"{MODEL}.pp_interleave_num") > 1:
        if written:
            reading.translate(DISPATCHER, ours, "allgather", GATHERED)
        else:
            reading.left_out(DISPATCHER, ours, "allgather", f"left out: {GATHERED}")
    elif written:
        reading.translate(DISPATCHER, ours, "alltoall", SENDS[kind])
    else:
        reading.left_out(DISPATCHER, ours, "alltoall", "left out: sorted tokens are sent to their experts")


def _predicts_ahead(reading: Reading) -> bool:
    if any(map(reading.has, AHEAD)):
        return any(reading.count(key, 0) for key in AHEAD)
    return predicts_ahead(reading)


def _is_grouped(reading: Reading) -> bool:
    return any(map(reading.get, GROUPED))


def _tensor_ranks(reading: Reading) -> int:
    return reading.count("parallel_config.model_parallel") if reading.get("use_parallel") else 1


def _first(reading: Reading, ours: str, keys: tuple[str, ...]) -> None:
    """Our key takes the first of theirs that has a value."""
    written = [key for key in keys if reading.has(key)]
    chosen = next((key for key in written if reading.get(key) is not None), None)
    for key in written:
        if key == chosen:
            reading.translate(key, f"{MODEL}.{ours}")
        elif reading.get(key) in (None, reading.get(chosen or key)):
            reading.idle(key, "empty" if reading.get(key) is None else f"{chosen} says the same")
        else:
            reading.refuse(key, f"contradicts {chosen} {shown(reading.get(chosen or key))}")


def _fixed(reading: Reading, key: str, fixed: Fixed) -> None:
    if not fixed.values or reading.get(key) in fixed.values:
        reading.idle(key, fixed.reason)
    else:
        reading.refuse(key, f"{fixed.reason} here; write {shown(fixed.values[0])}")


def _shared(reading: Reading) -> None:
    """One shared expert as wide as all of theirs together: the sum of what they return is the same."""
    if reading.get(SHARED_WIDTH):
        reading.use(SHARED_WIDTH)
    elif reading.has(SHARED_WIDTH):
        reading.idle(SHARED_WIDTH, "empty")
    widths = (*SAME["moe_intermediate_size"], f"{MODEL}.intermediate_size")
    of_expert = next((reading.count(key) for key in widths if reading.number(key, 0) > 0), 1)
    for key in SHARED:
        if not reading.has(key):
            continue
        count = int(reading.number(key, 0))
        if count and not reading.get(SHARED_WIDTH):
            reading.translate(key, SHARED_WIDTH, count * of_expert, "one as wide as all of them")
        else:
            reading.idle(key, f"{SHARED_WIDTH} says it" if count else "there is none")


def _groups(reading: Reading) -> None:
    """Groups of experts; 0 is MindFormers' word for none."""
    reason = _why_no_groups(reading)
    for ours, keys in GROUPS.items():
        for key in keys:
            if not reading.has(key):
                continue
            if reading.number(key, 0) > 0 and not reason:
                reading.translate(key, f"{MODEL}.{ours}")
            else:
                reading.idle(key, reason or "there are no groups")
    if reading.has(METHOD):
        wanted = "group_limited_greedy" if reading.get(METHOD) == "group_limited_greedy" else "greedy"
        _fixed(reading, METHOD, Fixed("groups and bias say how experts are chosen", (wanted, None)))


def _why_no_groups(reading: Reading) -> str:
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
    """Scores are sigmoids, or a softmax of all logits. One of the chosen logits alone is that of all, divided by its sum."""
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
    """The losses that keep experts balanced, and the bias that does without."""
    biased = any(reading.get(key) for key in SAME["balance_via_topk_bias"])
    for key in RATES:
        if reading.has(key) and biased:
            reading.translate(key, f"{MODEL}.topk_bias_update_rate")
        elif reading.has(key):
            reading.idle(key, "there is no bias")
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
    _one_loss(reading, bool(listed))


def _one_loss(reading: Reading, listed: bool) -> None:
    """The keys that have one loss with one factor."""
    written = [key for key in FACTORS if reading.has(key)]
    factor = next((key for key in written if reading.number(key, 0) > 0), None)
    kind = reading.word(KIND) or ("switch" if factor == FACTORS[-1] else "aux_loss")
    kind = BALANCE.get(kind, kind)
    if reading.has(KIND):
        if factor is None or kind == "none":
            reading.idle(KIND, "there is no such loss")
        elif kind in BALANCE.values():
            reading.translate(KIND, f"{MODEL}.aux_loss_types", [kind], OF_STEP_BEFORE if kind == "global" else "")
        else:
            reading.refuse(KIND, f"losses are {', '.join(BALANCE)}")
    for key in written:
        if key != factor or listed or kind == "none":
            reading.idle(key, "another key says it" if factor and kind != "none" else "there is no such loss")
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
        reading.idle(LATENT_SWITCH, "kv_lora_rank says it" if latent else "attention is not latent")
    for name in LATENT:
        key = f"{MODEL}.{name}"
        if not reading.has(key):
            continue
        if latent and reading.get(key) is not None:
            reading.use(key)
        else:
            reading.idle(key, "empty" if latent else "attention is not latent")


def _prediction(reading: Reading) -> None:
    """Layers that predict further tokens, and the factor of their loss."""
    if max(reading.number(key, 0) for key in AHEAD) > 0:
        _first(reading, "num_nextn_predict_layers", AHEAD)
        _first(reading, "mtp_loss_factor", AHEAD_FACTORS)
        return
    for key in (*AHEAD, *AHEAD_FACTORS):
        if reading.has(key):
            reading.idle(key, "one token is predicted")
