"""The types a model computes in where weights are only read, on a CPU: float32, unless the user has asked for another.

A CPU has no kernels of bfloat16 and float16 for most operators: weights are rounded in every step, decoding takes tens of
times longer, and rounded products give another text. A shipped base says bfloat16 for devices, and so does a checkpoint that
was trained on them; neither is a wish of who predicts here. How a model is trained stays as it is written.
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
    """The configuration that a run which only reads weights computes with, and a line on it; empty where nothing is slow."""
    if config.run_mode not in READING or config.context.device_target != "CPU":
        return config, ""
    narrow = narrow_types(config.model.config)
    asked = {name: origin for name in narrow if (origin := _asked(config, name))}
    if chosen := [name for name in narrow if name not in asked]:
        config = override_config(config, {f"{MODEL}.{name}": FLOAT32 for name in chosen})
    if asked:
        name, origin = next(iter(asked.items()))
        key = f"--{MODEL}.{name}={FLOAT32}"
        said = f"{origin}: {name} {narrow[name]} is slow on a CPU, which has few kernels for it; {key} is faster"
        return config, said
    if chosen:
        name = chosen[0]
        key = f"--{MODEL}.{name}={narrow[name]}"
        return config, f"computing in float32, which is faster on a CPU than {narrow[name]}; {key} asks for that"
    return config, ""


def narrow_types(model: ModelConfig) -> dict[str, str]:
    """The types that are not float32, by their keys."""
    return {name: value for name in TYPES if (value := getattr(model, name)) != FLOAT32}


def _asked(config: RunConfig, name: str) -> Origin | None:
    """Where the user has written this key: an option, the file of the run, or a base of his own; None for a shipped base."""
    path: KeyPath = (*MODEL.split("."), name)
    origin = closest_origin(config._provenance.origins, path)
    if origin is None or origin.option or origin.file == str(config.source):
        return origin
    return None if Path(origin.file).resolve().is_relative_to(shipped_configs().resolve()) else origin
