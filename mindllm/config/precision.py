"""Types in which runs that only read weights compute on a CPU: float32, unless the user chose another type.

A CPU has no kernels of bfloat16 and float16 for most operators: weights are rounded in every step, decoding takes tens of times
longer, and rounded products change the generated text. A shipped base has bfloat16 for devices, as has a checkpoint trained on
them. Neither is a choice of the user who predicts on a CPU. Types of training do not change.
"""

from __future__ import annotations

from pathlib import Path

from mindllm.config.model import ModelConfig
from mindllm.config.reading.document import KeyPath, Origin, closest_origin
from mindllm.config.reading.load import override_config
from mindllm.config.reading.shipped import shipped_configs
from mindllm.config.run import RunConfig

READING = ("predict", "chat", "eval")
MODEL = "model.model_config"
TYPES = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")
FLOAT32 = "float32"


def on_this_device(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the configuration that a run which only reads weights computes with, and a line to log about it."""
    if config.run_mode not in READING or config.context.device_target != "CPU":
        return config, ""
    narrow = narrow_types(config.model.config)
    origins = {name: origin for name in narrow if (origin := _user_origin(config, name))}
    if chosen := [name for name in narrow if name not in origins]:
        config = override_config(config, {f"{MODEL}.{name}": FLOAT32 for name in chosen})
    if origins:
        name, origin = next(iter(origins.items()))
        key = f"--{MODEL}.{name}={FLOAT32}"
        message = f"{origin}: {name} {narrow[name]} is slow on a CPU, which has few kernels for it; {key} is faster"
        return config, message
    if chosen:
        name = chosen[0]
        key = f"--{MODEL}.{name}={narrow[name]}"
        return config, f"computing in float32, which is faster on a CPU than {narrow[name]}; {key} asks for that"
    return config, ""


def narrow_types(model: ModelConfig) -> dict[str, str]:
    """Return the types that are not float32, by key."""
    return {name: value for name in TYPES if (value := getattr(model, name)) != FLOAT32}


def _user_origin(config: RunConfig, name: str) -> Origin | None:
    """Return the place where the user wrote this key: an option, the YAML of the run, or its base; None for a shipped base."""
    path: KeyPath = (*MODEL.split("."), name)
    origin = closest_origin(config._provenance.origins, path)
    if origin is None or origin.option or origin.file == str(config.source):
        return origin
    return None if Path(origin.file).resolve().is_relative_to(shipped_configs().resolve()) else origin
