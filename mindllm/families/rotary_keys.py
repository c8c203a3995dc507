"""Rotary positions in ``config.json``: ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``, which newer files have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.errors import UserError, shortened
from mindllm.families.family import Content, given_or

FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
        "original_max_position_embeddings",
    ),
}
REFUSED = {"truncate": (True,)}  # what they may say of YaRN


def read_rotary(path: Path, content: Content, theta: float = 10000.0, partial: float = 1.0) -> dict[str, Any]:
    """``theta``, ``rope_scaling`` and the part that is turned, whichever layout says them.

    Raises:
        UserError: a scaling that is not known.
    """
    layout = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    values = content.get(layout) or {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: {layout}: must be an object (value {shortened(values)})")
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in FIELDS:
        raise UserError(
            f"{path}: {layout}.rope_type: not supported (value {shortened(kind)}); supported: {', '.join(FIELDS)}"
        )
    for key, allowed in REFUSED.items():
        if values.get(key) is not None and values[key] not in allowed:
            raise UserError(f"{path}: {layout}.{key}: not supported (value {shortened(values[key])})")
    turned = values.get("partial_rotary_factor", given_or(content, "partial_rotary_factor", partial))
    if partial == 1 and turned != 1:
        where = f"{layout}." if "partial_rotary_factor" in values else ""
        raise UserError(f"{path}: {where}partial_rotary_factor: must be 1 (value {shortened(turned)})")
    fields = {name: values[name] for name in FIELDS[kind] if values.get(name) is not None}
    scaling = None if kind == "default" else {"type": kind, **fields}
    base = values.get("rope_theta", given_or(content, "rope_theta", theta))
    return {"theta": base, "rope_scaling": scaling} | ({} if partial == 1 else {"partial_rotary_factor": turned})


def write_rotary(model: ModelConfig) -> Content:
    """The keys of the older layout, which new readers know too."""
    return {"rope_theta": model.theta, "rope_scaling": written_scaling(model)}


def written_scaling(model: ModelConfig) -> Content | None:
    """``rope_scaling`` with the names of their file."""
    if model.rope_scaling is None:
        return None
    fields = model.rope_scaling.model_dump(exclude_none=True)
    return {"rope_type": fields.pop("type"), **fields}
