"""Keys of the update and its callbacks: optimizer, lr_schedule, runner_wrapper, callbacks; and their translation.

``FP32StateAdamWeightDecay`` and its relatives derive from MindSpore's ``AdamWeightDecay``, which has no bias correction;
``AdamW`` has. In ``grouped_lr_schedule``, ``default`` replaces ``lr_schedule``. A group names weights by parts of their names or
by shell patterns (``trainer/optimizer_grouped_parameters.py``, 2.1): embedding, head and final norm by their mcore names; names
inside layers differ between networks.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

from mindllm.config.reading.document import Document, KeyPath
from mindllm.errors import nearest
from mindllm.mindformers.experts import is_latent
from mindllm.mindformers.reading import Outcome, Reading, Table, decided, idle, only, refused, used
from mindllm.mindformers.weight_names import LAYER, MCORE

SAVED_WHOLE = "a checkpoint holds whole parameters with the optimizer's state, written by one rank"
EXPERTS = "the keys of experts say how they are balanced; their tokens are in the metrics"
STEPS = "MindFormers' graphs always have five Newton-Schulz steps; write 5"

UPDATE: Table = {
    "optimizer.type": decided("optimizer.type"),
    "optimizer.betas": decided("optimizer.betas"),
    "optimizer.beta1": decided("optimizer.betas: [beta1, beta2]"),
    "optimizer.beta2": decided("optimizer.betas: [beta1, beta2]"),
    "optimizer.eps": decided("optimizer.eps"),
    "optimizer.weight_decay": decided("optimizer.weight_decay"),
    "optimizer.learning_rate": decided("lr_schedule.learning_rate"),
    "optimizer.use_fused": idle("the update is always one kernel per weight"),
    "optimizer.use_fused_adamw": idle("the update is always one kernel per weight"),
    "optimizer.swap": idle("optimizer state stays on the device here, and the dry run counts it"),
    "optimizer.amsgrad": only(False, None, reason="off", otherwise="AdamW has no amsgrad here"),
    "optimizer.maximize": only(False, None, reason="off", otherwise="the loss is made small"),
    **{
        f"optimizer.{key}": decided(f"optimizer.{ours}")
        for key, ours in {
            "adamw_betas": "betas",
            "adamw_eps": "eps",
            "matched_adamw_rms": "matched_adamw_rms",
            "momentum": "momentum",
            "nesterov": "nesterov",
        }.items()
    },
    "optimizer.comm_strategy": idle("matrices are always put together whole, and every rank keeps its own part"),
    "optimizer.ns_steps": only(5, None, reason="what it does anyway", otherwise=STEPS),
    "optimizer.ns_coefficients": refused("MindFormers' graphs always have the coefficients of Jordan et al."),
    "optimizer.qk_clip_enabled": decided("optimizer.qk_clip_threshold, or null"),
    "optimizer.qk_clip_threshold": decided("optimizer.qk_clip_threshold"),
    "optimizer.micro_batch_num": idle("the largest logit is that of all micro-batches whatever their number"),
    "lr_schedule.type": decided("lr_schedule.type"),
    "lr_schedule.learning_rate": used(),
    "lr_schedule.lr_end": decided("lr_schedule.lr_end"),
    "lr_schedule.warmup_ratio": decided("lr_schedule.warmup_ratio"),
    "lr_schedule.warmup_steps": decided("lr_schedule.warmup_steps"),
    "lr_schedule.warmup_lr_init": used(),
    "lr_schedule.total_steps": used(),
    "lr_schedule.power": used(),
    "lr_schedule.num_cycles": decided("lr_schedule.num_cycles"),
    "lr_schedule.decay_ratio": decided("lr_schedule.decay_ratio"),
    "lr_schedule.decay_start_steps": decided("lr_schedule.decay_ratio"),
    "lr_schedule.decay_start_ratio": decided("lr_schedule.decay_ratio"),
    "lr_schedule.decay_steps": refused("schedules decay to the end of the run here"),
    "lr_schedule.auto_register": refused("code of the user is never run"),
    "runner_wrapper.type": only(
        "MFTrainOneStepCell", reason="the only kind of step", otherwise="only MFTrainOneStepCell is a kind of step here"
    ),
    "runner_wrapper.sens": refused("a fixed loss scale is written as scale_sense"),
    "runner_wrapper.scale_sense": decided("runner_wrapper.scale_sense"),
    "runner_wrapper.scale_sense.type": decided("runner_wrapper.scale_sense.type"),
    "runner_wrapper.scale_sense.loss_scale_value": decided("runner_wrapper.scale_sense.loss_scale_value"),
    "runner_wrapper.scale_sense.scale_factor": decided("runner_wrapper.scale_sense.scale_factor"),
    "runner_wrapper.scale_sense.scale_window": decided("runner_wrapper.scale_sense.scale_window"),
    "runner_wrapper.use_clip_grad": used(),
    "runner_wrapper.max_grad_norm": used(),
    "runner_wrapper.local_norm": idle("it only prints"),
    "runner_wrapper.calculate_per_token_loss": idle("a token weighs the same wherever it falls"),
    "runner_wrapper.enable_check_overflow": idle("an update that is not finite is always left out"),
    "callbacks.[].type": decided("callbacks"),
    "callbacks.[].per_print_times": decided("callbacks.MFLossMonitor.per_print_times"),
    "callbacks.[].save_checkpoint_steps": decided("callbacks.CheckpointMonitor.save_checkpoint_steps"),
    "callbacks.[].keep_checkpoint_max": decided("callbacks.CheckpointMonitor.keep_checkpoint_max"),
    "callbacks.[].prefix": idle("checkpoints are named llm-STEP"),
    "callbacks.[].directory": idle("checkpoints stand in output_dir/checkpoint"),
    "callbacks.[].save_checkpoint_seconds": idle("checkpoints are written every save_checkpoint_steps"),
    "callbacks.[].keep_checkpoint_per_n_minutes": idle("the newest keep_checkpoint_max are kept"),
    "callbacks.[].integrated_save": idle(SAVED_WHOLE),
    "callbacks.[].async_save": idle(SAVED_WHOLE),
    "callbacks.[].save_network_params": idle(SAVED_WHOLE),
    "callbacks.[].save_trainable_params": idle(SAVED_WHOLE),
    "callbacks.[].save_optimizer": idle(SAVED_WHOLE),
    "callbacks.[].checkpoint_format": idle("checkpoints are safetensors"),
    "callbacks.[].remove_redundancy": idle(SAVED_WHOLE),
    "callbacks.[].embedding_local_norm_threshold": idle("it only watches"),
    "callbacks.[].keep_last": idle("nothing is uploaded"),
    "callbacks.[].upload_frequence": idle("nothing is uploaded"),
    "callbacks.[].step_interval": idle("it only watches"),
    **{
        f"callbacks.[].{key}": idle(EXPERTS)
        for key in [
            "balance_via_topk_bias",
            "expert_num",
            "micro_batch_num",
            "topk_bias_update_rate",
            "mtp_depth",
            "num_layers",
        ]
    },
}
WATCHERS = {
    "ObsMonitor": "nothing is uploaded",
    "SummaryMonitor": "callbacks: SummaryMonitor has other keys in mindllm",
    "ProfileMonitor": "the keys profile... configure the profile",
    "ColdHotExpertMonitor": EXPERTS,
    "TopkBiasBalanceCallback": EXPERTS,
    "MoEDropRateCallback": EXPERTS,
    "MaxLogitsMonitor": "it only watches",
    "TrainingStateMonitor": "it only watches; MetricsMonitor writes loss, norm and rate",
    "StressDetectCallBack": "it only watches",
    "EvalCallBack": "do_eval and eval_step_interval say when to evaluate",
}
"""Callbacks without a counterpart, and why none is needed (experts themselves are refused)."""


MUON = "Muon"
OF_MUON = (
    "adamw_betas",
    "adamw_eps",
    "matched_adamw_rms",
    "momentum",
    "nesterov",
    "qk_clip_enabled",
    "qk_clip_threshold",
)
CLIPS, THRESHOLD, THEIR_THRESHOLD = "optimizer.qk_clip_enabled", "optimizer.qk_clip_threshold", 100.0
NO_HEADS = (
    "MindFormers scales heads of latent attention alone, of other models it clips none; mindllm's own YAML has "
    "optimizer.qk_clip_threshold for both"
)
CORRECTED = ("AdamW", "FusedAdamW")
OF_RESEARCH = "AdamWeightDecayX"  # of MindFormers 1.2 to 1.5, research/*/optim.py
UNCORRECTED = (
    "FP32StateAdamWeightDecay",
    "FusedAdamWeightDecay",
    "AdamWeightDecay",
    "FusedFP32StateAdamWeightDecay",
    "FusedCastAdamWeightDecay",
    "FP32AdamWeightDecay",
)
THEIR_BETAS = (0.9, 0.999)
THEIR_EPS = {"AdamW": 1e-8, "FusedAdamW": 1e-8, OF_RESEARCH: 1e-8}  # of the others 1e-6
SCHEDULES = {  # their names and those of Hugging Face, which they take too
    "ConstantWarmUpLR": "ConstantWarmUpLR",
    "constant_with_warmup": "ConstantWarmUpLR",
    "LinearWithWarmUpLR": "LinearWithWarmUpLR",
    "linear": "LinearWithWarmUpLR",
    "CosineWithWarmUpLR": "CosineWithWarmUpLR",
    "cosine": "CosineWithWarmUpLR",
    "CosineWithRestartsAndWarmUpLR": "CosineWithRestartsAndWarmUpLR",
    "cosine_with_restarts": "CosineWithRestartsAndWarmUpLR",
    "PolynomialWithWarmUpLR": "PolynomialWithWarmUpLR",
    "polynomial": "PolynomialWithWarmUpLR",
    "WarmUpStableDecayLR": "WarmUpStableDecayLR",
}
SMALL_END = 1e-7
STABLE = "WarmUpStableDecayLR"
DECAY = "lr_schedule.decay_ratio"
SCALE = "runner_wrapper.scale_sense"


def translate_update(reading: Reading) -> None:
    """Translate ``optimizer``, ``lr_schedule``, ``runner_wrapper`` and ``callbacks``."""
    _optimizer(reading)
    _schedule(reading)
    translate_groups(reading, _schedule)
    _loss_scale(reading)
    _callbacks(reading)


def _optimizer(reading: Reading) -> None:
    if not reading.has("optimizer.type"):
        return
    kind = reading.word("optimizer.type")
    if kind in UNCORRECTED:
        reading.put("optimizer.bias_correction", False, ("optimizer", "type"))
        reason = "AdamW without bias correction, state in float32: the update of this optimizer"
        reading.translate("optimizer.type", "optimizer.type", "AdamW", reason)
    elif kind in CORRECTED:
        reading.translate("optimizer.type", "optimizer.type", "AdamW")
    elif kind == OF_RESEARCH:
        reason = "AdamW with bias correction; this optimizer adds eps before it corrects the second moment"
        reading.translate("optimizer.type", "optimizer.type", "AdamW", reason)
    elif kind == MUON:
        _muon(reading)
        return
    else:
        hint = nearest(kind, (*CORRECTED, *UNCORRECTED, OF_RESEARCH, MUON))
        reading.refuse("optimizer.type", f"this optimizer is not here yet{hint}")
        return
    for key in OF_MUON:
        if reading.has(f"optimizer.{key}"):
            reading.idle(f"optimizer.{key}", "a key of Muon")
    _betas(reading)
    _or_default(reading, "optimizer.eps", THEIR_EPS.get(kind, 1e-6), 1e-8)
    _or_default(reading, "optimizer.weight_decay", 0.0, 0.1)
    _optimizer_rate(reading)


def _muon(reading: Reading) -> None:
    """Translate Muon, whose AdamW has separate keys."""
    reading.use("optimizer.type")
    _qk_clip(reading)
    for name, ours, usual in (("adamw_betas", "betas", [0.95, 0.95]), ("adamw_eps", "eps", 1e-8)):
        if reading.get(f"optimizer.{name}") is not None:
            reading.translate(f"optimizer.{name}", f"optimizer.{ours}")
        else:
            reading.set_omitted(f"optimizer.{name}", f"optimizer.{ours}", usual, "left out: the default of MindFormers")
    for key in ("matched_adamw_rms", "momentum", "nesterov", "weight_decay"):
        if reading.has(f"optimizer.{key}"):
            reading.use(f"optimizer.{key}")
    _optimizer_rate(reading)


def _qk_clip(reading: Reading) -> None:
    """Translate QK-clip, which MindFormers enables by default; null disables it."""
    clips, has_threshold = reading.get(CLIPS, True), reading.has(THRESHOLD)
    if clips is False or not is_latent(reading):
        reason = "off" if clips is False else NO_HEADS
        for key in (CLIPS, THRESHOLD):
            if reading.has(key):
                reading.idle(key, reason)
        return
    threshold = reading.get(THRESHOLD, THEIR_THRESHOLD)
    if has_threshold:
        reading.translate(THRESHOLD, THRESHOLD, threshold)
    else:
        reading.set_omitted(THRESHOLD, THRESHOLD, threshold, "left out: the default of MindFormers")
    if reading.has(CLIPS):
        reading.translate(CLIPS, THRESHOLD, threshold)


def _optimizer_rate(reading: Reading) -> None:
    if reading.has("optimizer.learning_rate"):
        rate = reading.get("optimizer.learning_rate")
        if reading.has("lr_schedule.learning_rate") or reading.has("grouped_lr_schedule.default"):
            reading.idle("optimizer.learning_rate", "lr_schedule.learning_rate decides")
        else:
            reading.translate("optimizer.learning_rate", "lr_schedule.learning_rate", rate)


def _betas(reading: Reading) -> None:
    if reading.has("optimizer.betas"):
        reading.use("optimizer.betas")
        return
    pair = [reading.get(f"optimizer.beta{number}", usual) for number, usual in zip((1, 2), THEIR_BETAS, strict=True)]
    keys = [key for key in ("optimizer.beta1", "optimizer.beta2") if reading.has(key)]
    for key in keys:
        reading.translate(key, "optimizer.betas", pair)
    if not keys:
        reading.set_omitted("optimizer.betas", "optimizer.betas", pair, "left out: the default of MindFormers")


def _or_default(reading: Reading, key: str, default: Any, own_default: Any) -> None:
    """Copy the key, or set MindFormers' default if it differs from that of mindllm."""
    if reading.get(key) is not None:
        reading.use(key)
    elif default != own_default:
        reading.set_omitted(key, key, default, "left out: the default of MindFormers")


def _schedule(reading: Reading) -> None:
    if not reading.has("lr_schedule.type"):
        return
    source_kind = reading.word("lr_schedule.type")
    kind = SCHEDULES.get(source_kind)
    if kind is None:
        reading.refuse("lr_schedule.type", f"this schedule is not here yet{nearest(source_kind, SCHEDULES)}")
        return
    reading.translate("lr_schedule.type", "lr_schedule.type", kind)
    ratio, steps = "lr_schedule.warmup_ratio", "lr_schedule.warmup_steps"
    if reading.get(ratio) is not None:
        reading.use(ratio)
        if reading.has(steps):
            reading.idle(steps, "warmup_ratio is given too, and wins")
    elif reading.has(steps):
        reading.use(steps)
        if reading.has(ratio):
            reading.idle(ratio, "empty")
    elif reading.has(ratio):
        reading.idle(ratio, "empty")
    end = "lr_schedule.lr_end"
    if reading.has(end):
        if kind == "ConstantWarmUpLR":
            reading.idle(end, "the rate is constant")
        else:
            reading.use(end)
    elif kind in ("PolynomialWithWarmUpLR", STABLE):
        reading.set_omitted(end, end, SMALL_END, "left out: the default of MindFormers")
    _key_of_schedule(reading, "lr_schedule.num_cycles", kind, "CosineWithRestartsAndWarmUpLR", usual=(0.5,))
    _key_of_schedule(reading, "lr_schedule.decay_ratio", kind, STABLE)
    _decay_start(reading, kind)


def _decay_start(reading: Reading, kind: str) -> None:
    """Translate the start of the decay, a step or a fraction of all steps, into its length as a fraction."""
    ratio, steps, total = (f"lr_schedule.{key}" for key in ("decay_start_ratio", "decay_start_steps", "total_steps"))
    keys = [key for key in (ratio, steps) if reading.has(key)]
    if kind != STABLE:
        for key in keys:
            _key_of_schedule(reading, key, kind, STABLE)
        return
    length, part, begin = reading.number(total, -1), reading.get(ratio), reading.get(steps)
    for key in keys:
        if reading.get(key) is None or (key == steps and part is not None):
            reading.idle(key, "empty" if reading.get(key) is None else f"{ratio} is given too, and wins")
    if part is not None:
        start = reading.number(ratio, 0.0)
        decay = 1.0 - (int(start * length) / length if length > 0 else start)
        reading.translate(ratio, DECAY, decay, "" if length > 0 else "the decay begins at the next whole step")
    elif begin is not None and length > 0:
        reading.translate(steps, DECAY, 1.0 - reading.number(steps, 0) / length)
    elif begin is not None:
        reading.refuse(steps, f"a decay is a part of all steps here; write {ratio}, or {total}")


def _key_of_schedule(reading: Reading, key: str, kind: str, owner: str, usual: tuple[float, ...] = ()) -> None:
    if not reading.has(key):
        return
    if kind == owner:
        reading.use(key)
    elif reading.get(key) is None or reading.get(key) in usual:
        reading.idle(key, "what this schedule does anyway")
    else:
        reading.refuse(key, f"{kind} has no such key here; it is a key of {owner}")


def _loss_scale(reading: Reading) -> None:
    scale = reading.get(SCALE)
    if not isinstance(scale, dict):
        if reading.has(SCALE):
            reading.idle(SCALE, "empty") if scale is None else reading.use(SCALE)
        return
    names = ("type", "loss_scale_value", "scale_factor", "scale_window")
    written = [name for name in names if reading.has(f"{SCALE}.{name}")]
    for name in written:
        reading.use(f"{SCALE}.{name}")
    if scale.get("scale_factor") == 1 or scale.get("type") == "FixedLossScaleUpdateCell":
        for name in ("scale_factor", "scale_window"):
            reading.ours.data["runner_wrapper"]["scale_sense"].pop(name, None)
            if name in written:
                reading.idle(f"{SCALE}.{name}", "the scale never changes")
        reading.translate(f"{SCALE}.type", f"{SCALE}.type", "FixedLossScaleUpdateCell")


def _callbacks(reading: Reading) -> None:
    listed = reading.get("callbacks")
    if not isinstance(listed, list):
        return
    ours: list[dict[str, Any]] = []
    for index, entry in enumerate(listed):
        kind = str(entry.get("type")) if isinstance(entry, dict) else ""
        path = ("callbacks", index, "type")
        if kind in ("MFLossMonitor", "CheckpointMonitor", "CheckpointMointor"):
            keys = ("per_print_times",) if kind == "MFLossMonitor" else ("save_checkpoint_steps", "keep_checkpoint_max")
            name = "MFLossMonitor" if kind == "MFLossMonitor" else "CheckpointMonitor"
            ours.append(_callback(reading, index, entry, name, keys))
        elif kind in WATCHERS:
            for key in entry:
                reading.note(("callbacks", index, key), Outcome.WITHOUT_EFFECT, reason=WATCHERS[kind])
        else:
            hint = nearest(str(kind), ("MFLossMonitor", "CheckpointMonitor", *WATCHERS))
            reading.note(path, Outcome.REFUSED, reason=f"this callback is not here{hint}")
    if not any(entry["type"] == "MFLossMonitor" for entry in ours):
        ours.insert(0, {"type": "MFLossMonitor"})  # MindFormers adds it itself
    reading.put("callbacks", ours, ("callbacks",))


def is_of_watcher(reading: Reading, path: KeyPath) -> bool:
    """Return True if ``path`` is a key of a callback without effect."""
    return path[0] == "callbacks" and len(path) > 1 and reading.get(f"callbacks.{path[1]}.type") in WATCHERS


def _callback(reading: Reading, index: int, entry: dict[str, Any], name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    used = {"type": name}
    is_same_type = entry.get("type") == name
    reading.note(
        ("callbacks", index, "type"),
        Outcome.USED if is_same_type else Outcome.TRANSLATED,
        "" if is_same_type else f"callbacks: {name}",
    )
    for key in keys:
        if entry.get(key) is not None:
            used[key] = entry[key]
            reading.note(("callbacks", index, key), Outcome.USED)
    if name == "CheckpointMonitor" and "save_checkpoint_steps" not in used:
        used["save_checkpoint_steps"] = 1  # type: ignore[assignment]
    for key in entry:
        foreign = (
            key in ("per_print_times", "save_checkpoint_steps", "keep_checkpoint_max", "step_interval")
            and key not in used
        )
        if foreign:
            reading.note(("callbacks", index, key), Outcome.WITHOUT_EFFECT, reason=f"no key of {name}, or empty")
    return used


SECTION, SCHEDULE = "grouped_lr_schedule", "lr_schedule"
OUTSIDE = {origin.name: ours for ours, origin in MCORE.items() if LAYER not in ours}
BEGINNINGS = tuple(name.split(".")[0] for name in OUTSIDE if not name.startswith("decoder."))
FINAL_NORM = "decoder.final_layernorm"


def translate_groups(reading: Reading, translate: Callable[[Reading], None]) -> None:
    """Translate ``grouped_lr_schedule``."""
    default, groups = reading.get(f"{SECTION}.default"), reading.get(f"{SECTION}.grouped")
    if isinstance(default, dict):
        if isinstance(written := reading.get(SCHEDULE), dict):
            for key in written:
                reading.idle(f"{SCHEDULE}.{key}", f"{SECTION}.default decides")
        reading.put(SCHEDULE, _translated(reading, (SECTION, "default"), default, translate), (SECTION, "default"))
    elif default is not None:
        reading.refuse(f"{SECTION}.default", "the schedule of weights without a group is a section")
    if not isinstance(groups, list):
        return
    ours = []
    for number, group in enumerate(groups):
        path = (SECTION, "grouped", number)
        if not isinstance(group, dict):
            reading.note(path, Outcome.REFUSED, reason="a group is a section with params and a schedule")
            continue
        schedule = _translated(reading, path, group, translate)
        ours.append({**schedule, "params": _weights(reading, (*path, "params"), group.get("params"))})
    reading.put(f"{SECTION}.grouped", ours, (SECTION, "grouped"))


def _translated(
    reading: Reading, path: KeyPath, schedule: dict[str, Any], translate: Callable[[Reading], None]
) -> dict[str, Any]:
    """Return a schedule in the form of mindllm; record the outcome of its keys at ``path``."""
    inner = Reading(Document({SCHEDULE: {key: value for key, value in schedule.items() if key != "params"}}))
    for key in schedule:
        rule = UPDATE.get(f"{SCHEDULE}.{key}")
        if rule is None and key != "params":
            reading.note((*path, key), Outcome.REFUSED, reason=f"no key of {SCHEDULE}")
        elif rule is not None and rule.outcome is Outcome.REFUSED:
            inner.refuse(f"{SCHEDULE}.{key}", rule.reason)
        elif rule is not None and not rule.decided:
            inner.use(f"{SCHEDULE}.{key}")
    translate(inner)
    for (_, *below), entry in inner.entries.items():
        if below[0] in schedule:
            reading.note((*path, *below), entry.outcome, entry.becomes, entry.reason)
    result: dict[str, Any] = inner.ours.data.get(SCHEDULE, {})
    return result


def _weights(reading: Reading, path: KeyPath, patterns: Any) -> list[str]:
    """Return the weights of mindllm that match the patterns."""
    listed = patterns if isinstance(patterns, list) else []
    weights = []
    for pattern in map(str, listed):
        names = [ours for name, ours in OUTSIDE.items() if pattern in name or fnmatch(name, pattern)]
        if not names or not pattern.startswith((*BEGINNINGS, FINAL_NORM)):
            reason = (
                f"weights of layers have other names here; write grouped_lr_schedule in a YAML of mindllm ({pattern})"
            )
            reading.note(path, Outcome.REFUSED, reason=reason)
            return []
        weights += names
    reading.note(path, Outcome.TRANSLATED, f"params: {weights}")
    return weights
