"""Values of a ``config.json`` that no model has: refused before anything is computed from them, whatever family it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mindllm.errors import UserError, shortened

MOST_LAYERS = 10_000
MOST = 2**31 - 1
LARGEST = 1e30  # of numbers with a fraction: bases of rotations reach 1e9
MOST_PARAMETERS = 10**14
DEEPEST = 20  # objects in objects

LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
WIDTHS = ("hidden_size", "n_embd", "intermediate_size", "ffn_hidden_size", "n_inner")
VOCABULARIES = ("vocab_size", "padded_vocab_size")
HEADS = ("num_attention_heads", "n_head", "num_key_value_heads", "multi_query_group_num", "head_dim", "kv_channels")
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "sliding_window")
POSITIVE = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "rope_theta",
    "rotary_emb_base",
    "rope_ratio",
)


def refuse_implausible(path: Path, content: dict[str, Any]) -> None:
    """Checks sizes and numbers of ``content``, that of ``path``; a key that is absent or null is for the family to judge.

    Raises:
        UserError: one line that names the file, the key, the value and what it must be.
    """
    _refuse_deep(path, content)
    for key in (*LAYERS, *WIDTHS, *VOCABULARIES, *HEADS, *LENGTHS):
        unused = key == "sliding_window" and content.get("use_sliding_window") is False
        _check_whole(path, key, None if unused else content.get(key), MOST_LAYERS if key in LAYERS else MOST)
    for key in POSITIVE:
        _check_positive(path, key, content.get(key))
    parameters = _parameters(content)
    if parameters > MOST_PARAMETERS:
        raise UserError(
            f"{path}: {_named(content, LAYERS)}, {_named(content, WIDTHS)}, {_named(content, VOCABULARIES)}: make about "
            f"{parameters:.1e} parameters; no model has over {MOST_PARAMETERS:.0e}"
        )


def _check_whole(path: Path, key: str, value: Any, most: int) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise UserError(f"{path}: {key}: must be a whole number from 1 to {most} (value {shortened(value)})")


def _check_positive(path: Path, key: str, value: Any) -> None:
    is_number = type(value) in (int, float)
    if value is not None and not (is_number and math.isfinite(value) and 0 < value <= LARGEST):
        raise UserError(f"{path}: {key}: must be a number above 0 (value {shortened(value)})")


def _refuse_deep(path: Path, content: dict[str, Any]) -> None:
    level: list[tuple[str, Any]] = list(content.items())
    for _ in range(DEEPEST):
        level = [(key, entry) for key, value in level for entry in _entries(value)]
        if not level:
            return
    raise UserError(f"{path}: {level[0][0]}: is nested over {DEEPEST} deep, which no value of a model is")


def _entries(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _parameters(content: dict[str, Any]) -> int:
    """The weights that the sizes make at least, very roughly: one square and three matrices of the feed-forward in each layer."""
    layers, hidden, vocabulary = (_first(content, keys) for keys in (LAYERS, ("hidden_size", "n_embd"), VOCABULARIES))
    inner = _first(content, ("intermediate_size", "ffn_hidden_size", "n_inner"))
    return layers * hidden * (hidden + 3 * inner) + vocabulary * hidden


def _first(content: dict[str, Any], keys: tuple[str, ...]) -> int:
    return next((content[key] for key in keys if content.get(key) is not None), 0)


def _named(content: dict[str, Any], keys: tuple[str, ...]) -> str:
    return ", ".join(f"{key} {content[key]}" for key in keys if content.get(key) is not None)
