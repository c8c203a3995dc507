"""Hugging Face's ``config.json`` of a Llama as a :class:`ModelConfig`, and the way back.

Rotary positions are read in both layouts: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``. What is left out has
the default of ``transformers``' ``LlamaConfig``, not ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindllm.config.model import ModelConfig
from mindllm.config.plausible import refuse_implausible
from mindllm.errors import UserError, shortened

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
LONGEST_SAMPLE = 4096  # of a run that gives no seq_length: contexts of 131072 tokens are for those who ask for them

REQUIRED = {  # our key -> theirs
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
DEFAULTED = {  # our key -> theirs and its default
    "n_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "max_position_embedding": ("max_position_embeddings", 2048),
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "initializer_range": ("initializer_range", 0.02),
}
BIASES = ("qkv_has_bias", "attn_proj_has_bias")  # attention_bias is both
ONLY = {  # what a key has to say, where it says anything
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
}
ROPE_TYPES = ("default", "linear", "llama3")
ROPE_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def is_hugging_face(directory: Path | str) -> bool:
    """Whether ``directory`` is a model directory of Hugging Face, which a checkpoint of ours is not."""
    return (Path(directory) / CONFIG).is_file() and not (Path(directory) / "manifest.json").exists()


def read_model_config(directory: Path | str) -> ModelConfig:
    """The architecture that ``directory/config.json`` describes; its fields that are set are those the file decides.

    Raises:
        UserError: the file is missing, no JSON, incomplete, or describes what the decoder does not compute.
    """
    path = Path(directory) / CONFIG
    content = read_json(path)
    refuse_implausible(path, content)
    for key, allowed in ONLY.items():
        value = content.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(str, allowed)) or "nothing"
            raise UserError(
                f"{path}: {key}: this model is not supported (value {shortened(value)}); supported: {wanted}"
            )
    missing = [theirs for theirs in REQUIRED.values() if content.get(theirs) is None]
    if missing:
        raise UserError(f"{path}: {', '.join(missing)}: missing; it is not the {CONFIG} of a Llama")
    fields = {ours: content[theirs] for ours, theirs in REQUIRED.items()}
    fields |= {ours: _given_or(content, *named) for ours, named in DEFAULTED.items()}
    fields |= dict.fromkeys(BIASES, _given_or(content, "attention_bias", False))
    fields |= _rotary(path, content) | _end_of_text(path.with_name(GENERATION_CONFIG), content)
    return _validated(path, fields)


def config_json(model: ModelConfig, dtype: str, special_tokens: dict[str, Any]) -> dict[str, Any]:
    """The content of ``config.json`` for weights of ``dtype``, in the layout that old and new ``transformers`` read.

    ``special_tokens`` gives ``bos_token_id``, ``eos_token_id``, ``pad_token_id``.

    Raises:
        UserError: ``LlamaForCausalLM`` has no such biases.
    """
    if model.qkv_has_bias != model.attn_proj_has_bias:
        raise UserError(
            "a Llama of Hugging Face has a bias on all projections of the attention or on none; model.model_config says "
            f"qkv_has_bias {model.qkv_has_bias} and attn_proj_has_bias {model.attn_proj_has_bias}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(model, ours) for ours, theirs in REQUIRED.items()},
        **{theirs: getattr(model, ours) for ours, (theirs, _) in DEFAULTED.items()},
        "attention_bias": model.qkv_has_bias,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rope_theta": model.theta,
        "rope_scaling": None if model.rope_scaling is None else _rope_scaling(model.rope_scaling.model_dump()),
        **special_tokens,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def their_name(key: str) -> str:
    """The name in ``config.json`` of a key of ``model.model_config``."""
    if key in BIASES:
        return "attention_bias"
    return REQUIRED.get(key) or DEFAULTED.get(key, ({"theta": "rope_theta"}.get(key, key),))[0]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises UserError when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no object of keys and values")
    return content


def _given_or(content: dict[str, Any], key: str, default: Any) -> Any:
    value = content.get(key)
    return default if value is None else value


def _rotary(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """``theta`` and ``rope_scaling``, whichever layout says them."""
    layout = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    values = content.get(layout) or {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: {layout}: must be an object (value {shortened(values)})")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UserError(
            f"{path}: {layout}.rope_type: not supported (value {shortened(kind)}); supported: {', '.join(ROPE_TYPES)}"
        )
    if values.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"{path}: {layout}.partial_rotary_factor: must be 1 (value {values['partial_rotary_factor']})")
    theta = values.get("rope_theta", _given_or(content, "rope_theta", 10000.0))
    fields = {name: values[name] for name in ROPE_FIELDS if name in values}
    return {"theta": theta, "rope_scaling": None if kind == "default" else {"type": kind, **fields}}


def _rope_scaling(scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": scaling.pop("type"), **scaling}


def _end_of_text(generation: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The tokens that end a text: generation_config.json knows them better than config.json."""
    told = read_json(generation).get("eos_token_id") if generation.is_file() else None
    ends = content.get("eos_token_id") if told is None else told
    return {} if ends is None or ends == -1 else {"eos_token_id": ends}


def _validated(path: Path, fields: dict[str, Any]) -> ModelConfig:
    length = fields["max_position_embedding"]
    fields["seq_length"] = min(length, LONGEST_SAMPLE) if isinstance(length, int) else 1
    try:
        model = ModelConfig.model_validate(fields)
        return model.model_copy(update={"n_kv_heads": model.n_kv_heads, "head_dim": model.head_dim})  # left out or not
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        key = ".".join([their_name(str(found["loc"][0])), *map(str, found["loc"][1:])])
        raise UserError(f"{path}: {key}: {found['msg']} (value {shortened(found['input'])})") from None
