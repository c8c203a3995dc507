"""Optimizer, learning rate, loss scale and callbacks of MindFormers.

``FP32StateAdamWeightDecay`` and its relatives derive from MindSpore's ``AdamWeightDecay``, which corrects no
bias; ``AdamW`` does.
"""

from __future__ import annotations

from typing import Any

from mindllm.errors import KeyPath, nearest
from mindllm.mindformers.experts import is_latent
from mindllm.mindformers.groups import translate_groups
from mindllm.mindformers.keys.rules import Outcome
from mindllm.mindformers.keys.update import WATCHERS
from mindllm.mindformers.reading import Reading

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
    """Sections ``optimizer``, ``lr_schedule``, ``runner_wrapper`` and ``callbacks``."""
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
    _own_rate(reading)


def _muon(reading: Reading) -> None:
    """Muon, whose AdamW has keys of its own."""
    reading.use("optimizer.type")
    _qk_clip(reading)
    for theirs, ours, usual in (("adamw_betas", "betas", [0.95, 0.95]), ("adamw_eps", "eps", 1e-8)):
        if reading.get(f"optimizer.{theirs}") is not None:
            reading.translate(f"optimizer.{theirs}", f"optimizer.{ours}")
        else:
            reading.left_out(f"optimizer.{theirs}", f"optimizer.{ours}", usual, "left out: the default of MindFormers")
    for key in ("matched_adamw_rms", "momentum", "nesterov", "weight_decay"):
        if reading.has(f"optimizer.{key}"):
            reading.use(f"optimizer.{key}")
    _own_rate(reading)


def _qk_clip(reading: Reading) -> None:
    """QK-clip, which theirs does unless it is told otherwise; one key says it here, and null is none."""
    clips, given = reading.get(CLIPS, True), reading.has(THRESHOLD)
    if clips is False or not is_latent(reading):
        reason = "off" if clips is False else NO_HEADS
        for key in (CLIPS, THRESHOLD):
            if reading.has(key):
                reading.idle(key, reason)
        return
    threshold = reading.get(THRESHOLD, THEIR_THRESHOLD)
    if given:
        reading.translate(THRESHOLD, THRESHOLD, threshold)
    else:
        reading.left_out(THRESHOLD, THRESHOLD, threshold, "left out: the default of MindFormers")
    if reading.has(CLIPS):
        reading.translate(CLIPS, THRESHOLD, threshold)


def _own_rate(reading: Reading) -> None:
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
    given = [key for key in ("optimizer.beta1", "optimizer.beta2") if reading.has(key)]
    for key in given:
        reading.translate(key, "optimizer.betas", pair)
    if not given:
        reading.left_out("optimizer.betas", "optimizer.betas", pair, "left out: the default of MindFormers")


def _or_default(reading: Reading, key: str, theirs: Any, ours: Any) -> None:
    """Uses the key, or their default where it is left out and ours is another."""
    if reading.get(key) is not None:
        reading.use(key)
    elif theirs != ours:
        reading.left_out(key, key, theirs, "left out: the default of MindFormers")


def _schedule(reading: Reading) -> None:
    if not reading.has("lr_schedule.type"):
        return
    theirs = reading.word("lr_schedule.type")
    kind = SCHEDULES.get(theirs)
    if kind is None:
        reading.refuse("lr_schedule.type", f"this schedule is not here yet{nearest(theirs, SCHEDULES)}")
        return
    reading.translate("lr_schedule.type", "lr_schedule.type", kind)
    _warm_up(reading)
    end = "lr_schedule.lr_end"
    if reading.has(end):
        if kind == "ConstantWarmUpLR":
            reading.idle(end, "the rate stays what it is")
        else:
            reading.use(end)
    elif kind in ("PolynomialWithWarmUpLR", STABLE):
        reading.left_out(end, end, SMALL_END, "left out: the default of MindFormers")
    _only_of(reading, "lr_schedule.num_cycles", kind, "CosineWithRestartsAndWarmUpLR", usual=(0.5,))
    _only_of(reading, "lr_schedule.decay_ratio", kind, STABLE)
    _decay_start(reading, kind)


def _warm_up(reading: Reading) -> None:
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


def _decay_start(reading: Reading, kind: str) -> None:
    """Where their decay begins: a step, or a part of all steps, which wins. Ours has a length, as a part of all steps."""
    ratio, steps, total = (f"lr_schedule.{key}" for key in ("decay_start_ratio", "decay_start_steps", "total_steps"))
    given = [key for key in (ratio, steps) if reading.has(key)]
    if kind != STABLE:
        for key in given:
            _only_of(reading, key, kind, STABLE)
        return
    length, part, begin = reading.number(total, -1), reading.get(ratio), reading.get(steps)
    for key in given:
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


def _only_of(reading: Reading, key: str, kind: str, owner: str, usual: tuple[float, ...] = ()) -> None:
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
    given = [name for name in names if reading.has(f"{SCALE}.{name}")]
    for name in given:
        reading.use(f"{SCALE}.{name}")
    if scale.get("scale_factor") == 1 or scale.get("type") == "FixedLossScaleUpdateCell":
        for name in ("scale_factor", "scale_window"):
            reading.ours.data["runner_wrapper"]["scale_sense"].pop(name, None)
            if name in given:
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
    """Whether ``path`` is a key of a callback that changes nothing, whatever it says."""
    return path[0] == "callbacks" and len(path) > 1 and reading.get(f"callbacks.{path[1]}.type") in WATCHERS


def _callback(reading: Reading, index: int, entry: dict[str, Any], name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    used = {"type": name}
    same = entry.get("type") == name
    reading.note(
        ("callbacks", index, "type"),
        Outcome.USED if same else Outcome.TRANSLATED,
        "" if same else f"callbacks: {name}",
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
