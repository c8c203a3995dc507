"""Which layers have a sliding window, in ``config.json``."""

from __future__ import annotations

from mindllm.config.architecture_keys import FULL, SLIDING, layer_types
from mindllm.config.model import ModelConfig
from mindllm.families.family import Content


def read_pattern(content: Content, every: int) -> dict[str, object]:
    """``layer_types``, or every so manieth layer without a window (``sliding_window_pattern``, else ``every``)."""
    if content.get("layer_types") is not None:
        return {"layer_types": content["layer_types"]}
    return {"sliding_window_pattern": content.get("sliding_window_pattern", every)}


def written_types(model: ModelConfig) -> list[str]:
    """``layer_types``, a word for each layer."""
    return list(layer_types(model))


def read_last_layers(content: Content) -> dict[str, object]:
    """Windows of the layers from ``max_window_layers`` on, if ``use_sliding_window`` (Qwen 2 and 3)."""
    if not content.get("use_sliding_window") or content.get("sliding_window") is None:
        return {}
    types = content.get("layer_types")
    if types is None:
        first, count = content.get("max_window_layers", 28), content["num_hidden_layers"]
        types = [SLIDING if number >= first else FULL for number in range(count)]
    return {"sliding_window": content["sliding_window"], "layer_types": types}


def write_last_layers(model: ModelConfig) -> Content:
    """The keys that :func:`read_last_layers` reads."""
    if model.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        "layer_types": written_types(model),
        "max_window_layers": layer_types(model).index(SLIDING) if SLIDING in layer_types(model) else model.num_layers,
    }
