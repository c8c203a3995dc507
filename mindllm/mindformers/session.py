"""What a run does and how it looks back: run mode, evaluation, profile, generation."""

from __future__ import annotations

from mindllm.mindformers.keys.model import GENERATION, WRITING
from mindllm.mindformers.reading import Reading

MODEL = "model.model_config"
LENGTHS = ("max_new_tokens", "max_decode_length")  # two names of one key
PROFILE_KEYS = ("profile_start_step", "profile_stop_step", "profile_memory", "profile_rank_ids", "with_stack")


def translate_session(reading: Reading) -> None:
    """Top-level keys that depend on each other, and the keys of generation in ``model.model_config``."""
    _mode(reading)
    _evaluation(reading)
    _profile(reading)
    _generation(reading)
    if reading.has("context.deterministic"):
        reading.translate(
            "context.deterministic", "train_precision_sync", reading.get("context.deterministic") in ("ON", True)
        )


def _mode(reading: Reading) -> None:
    key = "run_mode"
    if not reading.has(key):
        return
    mode = reading.get(key)
    if mode == "finetune" and not reading.get("load_checkpoint") and not reading.get("resume_training"):
        reason = "no weights are named: --load_checkpoint gives them"
        reading.translate(key, key, "train", reason)
    elif mode == "predict_with_train_model":
        reading.translate(key, key, "predict")
    elif mode == "eval":
        reading.refuse(key, _why_not_evaluated(reading))
    else:
        reading.use(key)


def _why_not_evaluated(reading: Reading) -> str:
    metric = reading.word("metric.type")
    if metric and metric != "PerplexityMetric":
        return f"{metric} scores generated text, which is not here; mindllm evaluate has other tasks"
    return "a part of train_dataset's files is evaluated here; write --run_mode=train and do_eval"


def _evaluation(reading: Reading) -> None:
    key, interval = "do_eval", "eval_step_interval"
    evaluates = bool(reading.get(key))
    if reading.has(key):
        if evaluates:
            reading.refuse(key, "a part of train_dataset's files is held out here; write --do_eval=false, or ours")
        else:
            reading.use(key)
    if reading.has(interval):
        reading.idle(interval, "do_eval is off")


def _profile(reading: Reading) -> None:
    for key in filter(reading.has, PROFILE_KEYS):
        if reading.get("profile"):
            reading.use(key)
        else:
            reading.idle(key, "profile is off")


def _generation(reading: Reading) -> None:
    """What a section of its own says counts before what stands among the keys of the model."""
    for name in WRITING:
        given = next((one for one in LENGTHS if reading.has(f"{GENERATION}.{one}")), name) if name in LENGTHS else name
        if reading.has(f"{GENERATION}.{given}") and reading.has(f"{MODEL}.{name}"):
            reading.idle(f"{MODEL}.{name}", f"{GENERATION}.{given} is given")
    sampled = bool(reading.get(f"{GENERATION}.do_sample", reading.get(f"{MODEL}.do_sample", True)))
    _generation_of(reading, GENERATION, sampled)
    _generation_of(reading, MODEL, sampled)


def _generation_of(reading: Reading, section: str, sampled: bool) -> None:
    """Sampling counts with ``do_sample`` only; lengths and penalties always."""
    for name in ("do_sample", "temperature", "top_k", "top_p"):
        key = f"{section}.{name}"
        if not reading.left(key):
            continue
        if sampled:
            reading.translate(key, f"generation.{name}")
        else:
            reading.idle(key, "the most likely token is taken")
    for name in ("num_beams", "repetition_penalty"):
        key = f"{section}.{name}"
        if reading.left(key):
            if reading.get(key) == 1:
                reading.idle(key, "1 is none")
            else:
                reading.translate(key, f"generation.{name}")
    new, longest = (f"{section}.{name}" for name in LENGTHS)
    if reading.left(new):
        reading.translate(new, "generation.max_new_tokens")
    if reading.left(longest):
        if reading.has(new):
            reading.idle(longest, "max_new_tokens is given")
        else:
            reading.translate(longest, "generation.max_new_tokens", reason="counted without the prompt here")
