"""Keys of ``config.json`` that families share: rotary positions, layers with a sliding window, layers with experts.

Rotary positions are ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``, which newer files have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindllm.config.model import FULL, SLIDING, ModelConfig, expert_layers, layer_types
from mindllm.config.model_keys import Llama3RopeScalingConfig
from mindllm.errors import UserError, shortened
from mindllm.families.family import Content, given_or
from mindllm.families.weight_table import EXPERT, FusedExperts, Weight, renamed
from mindllm.logs import warn_once

ORIGINAL = "original_max_position_embeddings"
FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", ORIGINAL),
}
"""What each kind of scaling reads; transformers ignores the fields of the other kinds."""
ROTARY_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "finetuned",
    *(key for keys in FIELDS.values() for key in keys),
}
GATE_UP_DOWN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FUSED_LAYER = "model.layers.{layer}.mlp"  # in the newest files, whatever the family


def read_rotary(path: Path, content: Content, theta: float = 10000.0, partial: float = 1.0) -> dict[str, Any]:
    """Return ``theta``, ``rope_scaling`` and the part that is turned, with the precedence of transformers.

    ``rope_scaling`` replaces ``rope_parameters``; values in the object replace those of ``config.json`` itself, except for
    ``original_max_position_embeddings``.

    Raises:
        UserError: a key may change the rotations in a way that is not computed; names it.
    """
    scaling, parameters = content.get("rope_scaling"), content.get("rope_parameters")
    layout, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters or {})
    if not isinstance(values, dict):
        raise UserError(f"{path}: {layout}: must be an object (value {shortened(values)})")
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in FIELDS:
        raise UserError(
            f"{path}: {layout}.rope_type: not supported (value {shortened(kind)}); supported: {', '.join(FIELDS)}"
        )
    _check_rope_keys(path, layout, values)
    turned = values.get("partial_rotary_factor", given_or(content, "partial_rotary_factor", partial))
    if partial == 1 and turned != 1:
        where = f"{layout}." if "partial_rotary_factor" in values else ""
        raise UserError(f"{path}: {where}partial_rotary_factor: must be 1 (value {shortened(turned)})")
    base = values.get("rope_theta", given_or(content, "rope_theta", theta))
    section = None if kind == "default" else {"type": kind, **_scaling_fields(path, layout, kind, values, content)}
    return {"theta": base, "rope_scaling": section} | ({} if partial == 1 else {"partial_rotary_factor": turned})


def check_rope_values(path: Path, content: Content, model: ModelConfig) -> None:
    """Log the rotary keys of ``config.json`` without effect, here and in transformers.

    Raises:
        UserError: the factors of ``llama3`` are not in order. Sections of a run are checked separately.
    """
    scaling, parameters = (
        value if isinstance(value := content.get(key), dict) else {} for key in ("rope_scaling", "rope_parameters")
    )
    if scaling and parameters and not {FULL, SLIDING} & parameters.keys():
        warn_once(__name__, f"{path}: rope_parameters is ignored because rope_scaling is set, as in transformers")
    values = scaling or parameters
    section = model.rope_scaling
    if isinstance(section, Llama3RopeScalingConfig) and section.high_freq_factor <= section.low_freq_factor:
        low, high = section.low_freq_factor, section.high_freq_factor
        raise UserError(f"{path}: high_freq_factor: must be above low_freq_factor {low} (value {high})")
    if values.get("rope_type", values.get("type")) == "dynamic":
        original = values.get(ORIGINAL, content.get(ORIGINAL))
        if original not in (None, content.get("max_position_embeddings")):
            warn_once(__name__, f"{path}: {ORIGINAL} is ignored with rope_type dynamic, as in transformers")


def _check_rope_keys(path: Path, layout: str, values: Mapping[str, Any]) -> None:
    """Raise UserError for the first key that may change the rotations and is unknown."""
    if values.get("truncate", True) is not True:
        raise UserError(f"{path}: {layout}.truncate: not supported (value {shortened(values['truncate'])})")
    for key, value in values.items():
        if key not in ROTARY_KEYS and key != "truncate" and value is not None:
            raise UserError(
                f"{path}: {layout}.{key}: not supported (value {shortened(value)}); remove the key if it does not change "
                "the rotations"
            )


def _scaling_fields(path: Path, layout: str, kind: str, values: Mapping[str, Any], content: Content) -> dict[str, Any]:
    """Return the fields of ``rope_scaling`` of a kind, with what transformers takes for absent ones."""
    fields = {name: values[name] for name in FIELDS[kind] if values.get(name) is not None}
    original = content.get(ORIGINAL)
    longest = content.get("max_position_embeddings")
    if kind == "dynamic" and values.get(ORIGINAL) is not None and values[ORIGINAL] == longest:
        fields[ORIGINAL] = longest  # another value is ignored by transformers
    if ORIGINAL in FIELDS[kind] and original is not None:
        fields[ORIGINAL] = original
    if kind != "llama3":
        return fields
    fields.setdefault(ORIGINAL, longest)
    if absent := [name for name in FIELDS[kind] if fields.get(name) is None]:
        raise UserError(f"{path}: {layout}.{absent[0]}: missing, which rope_type llama3 requires")
    return fields


def write_rotary(model: ModelConfig) -> Content:
    """Return the keys of the older layout, which new readers support as well."""
    return {"rope_theta": model.theta, "rope_scaling": written_scaling(model)}


def written_scaling(model: ModelConfig) -> Content | None:
    """Return ``rope_scaling`` with the names of ``config.json``."""
    if model.rope_scaling is None:
        return None
    fields = model.rope_scaling.model_dump(exclude_none=True)
    return {"rope_type": fields.pop("type"), **fields}


def read_pattern(content: Content, every: int) -> dict[str, object]:
    """Return ``layer_types``, or the pattern in which every N-th layer has no window (``sliding_window_pattern``, else
    ``every``).
    """
    if content.get("layer_types") is not None:
        return {"layer_types": content["layer_types"]}
    return {"sliding_window_pattern": content.get("sliding_window_pattern", every)}


def written_types(model: ModelConfig) -> list[str]:
    """Return ``layer_types``, one word per layer."""
    return list(layer_types(model))


def read_last_layers(content: Content) -> dict[str, object]:
    """Return windows of layers from ``max_window_layers`` on, if ``use_sliding_window`` is set (Qwen 2 and 3)."""
    if not content.get("use_sliding_window") or content.get("sliding_window") is None:
        return {}
    types = content.get("layer_types")
    if types is None:
        first, count = content.get("max_window_layers", 28), content["num_hidden_layers"]
        types = [SLIDING if number >= first else FULL for number in range(count)]
    return {"sliding_window": content["sliding_window"], "layer_types": types}


def write_last_layers(model: ModelConfig) -> Content:
    """Return the keys that :func:`read_last_layers` reads."""
    if model.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        "layer_types": written_types(model),
        "max_window_layers": layer_types(model).index(SLIDING) if SLIDING in layer_types(model) else model.num_layers,
    }


def read_sparse_step(content: Content, experts: int) -> dict[str, object]:
    """Return the layers with experts: every ``decoder_sparse_step``-th, without ``mlp_only_layers`` (Qwen 2 and 3)."""
    every, without = given_or(content, "decoder_sparse_step", 1), given_or(content, "mlp_only_layers", ())
    if (every == 1 and not without) or experts == 1:
        return {}
    count = content["num_hidden_layers"]
    return {"moe_layer_freq": [int((number + 1) % every == 0 and number not in without) for number in range(count)]}


def write_sparse_step(model: ModelConfig) -> Content:
    """Return the keys that :func:`read_sparse_step` reads."""
    without = [number for number, has in enumerate(expert_layers(model)) if not has]
    return {"decoder_sparse_step": 1, "mlp_only_layers": without}


def experts_weights(below: str, names: Mapping[str, str], router: str) -> tuple[Weight, ...]:
    """Return the entries of a router and its experts, with the path ``below`` in their layer."""
    experts = {
        f"feed_forward.experts.{ours}.weight": f"{below}.experts.{EXPERT}.{name}.weight" for ours, name in names.items()
    }
    return renamed({"feed_forward.router.weight": f"{below}.{router}.weight", **experts})


def fused_experts(below: str, names: Mapping[str, str]) -> tuple[FusedExperts, ...]:
    """Return the stacked tensors of the newest files, and the tensors of other files that they replace."""

    def expert_name(ours: str) -> str:
        return f"model.layers.{{layer}}.{below}.experts.{EXPERT}.{names[ours]}.weight"

    return (
        FusedExperts(f"{FUSED_LAYER}.experts.gate_up_proj", (expert_name("w1"), expert_name("w3"))),
        FusedExperts(f"{FUSED_LAYER}.experts.down_proj", (expert_name("w2"),)),
    )
