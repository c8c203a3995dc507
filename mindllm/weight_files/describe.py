"""Descriptions of weights: one path in detail (``mindllm weights info``), the models in a directory (``mindllm models``)."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from mindllm.config import ModelConfig, is_hugging_face, read_model_config, tokenizer_in
from mindllm.data import load_tokenizer
from mindllm.errors import UserError
from mindllm.families.hugging_face import family_in, quantization_in, read_json
from mindllm.gguf import gguf_file, gguf_files, read_header
from mindllm.terminal.tables import pairs
from mindllm.train.checkpoint.manifest import MANIFEST
from mindllm.train.checkpoint.tensors import Converted, TensorSource, payload_bytes
from mindllm.weight_files.hugging_face import python_files
from mindllm.weight_files.opening import open_weights
from mindllm.weight_files.peft import CONFIG_FILE

ARCHITECTURE_KEYS = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "n_kv_heads", "head_dim", "vocab_size"),
)
MOST_LISTED = 3
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
MOST_LEVELS = 3  # nested directories: an organization's models, the checkpoints of a run
MOST_MODELS = 500


def describe_weights(path: Path) -> dict[str, Any]:
    """Check the weights at ``path`` against their architecture and describe them. Raises like ``open_weights``."""
    opened = open_weights(path)
    # Hugging Face's weights are converted to fp32; the description shows the types in the files.
    weights = {name: item.source if isinstance(item, Converted) else item for name, item in opened.weights.items()}
    description: dict[str, Any] = {"path": str(path), "kind": opened.kind}
    model = opened.model
    if model is None:  # without an architecture: all tensors by the names in the files, including optimizer states
        return {**description, **_sizes(weights), "names": list(weights), "files": opened.files}
    scaling = model.rope_scaling
    return {
        **description,
        **{key: getattr(model, key) for key in ARCHITECTURE_KEYS},
        "max_position_embedding": model.max_position_embedding,
        "theta": model.theta,
        "rope_scaling": scaling.type if scaling else None,
        "tie_word_embeddings": model.tie_word_embeddings,
        "biases": [key for key in ("qkv_has_bias", "attn_proj_has_bias") if getattr(model, key)],
        **_sizes(weights),
        "files": opened.files,
        "code_not_run": python_files(path),
        "tokenizer": str(opened.tokenizer) if opened.tokenizer else None,
        "tokenizer_vocab_size": load_tokenizer(opened.tokenizer).vocab_size if opened.tokenizer else None,
    }


def _sizes(weights: Mapping[str, TensorSource]) -> dict[str, Any]:
    return {
        "parameters": sum(math.prod(tensor.shape) for tensor in weights.values()),
        "bytes": payload_bytes(weights),
        "tensors": dict(Counter(str(tensor.dtype) for tensor in weights.values())),
    }


def description_table(description: dict[str, Any]) -> RichTable:
    """Return a description as a table with a row for each value."""

    def cell(value: Any) -> str:
        if value is None or value == []:
            return "none"
        if isinstance(value, dict):
            return ", ".join(f"{count} {name}" for name, count in value.items())
        if isinstance(value, list):
            return ", ".join(value) if len(value) <= MOST_LISTED else f"{len(value)}: {value[0]} to {value[-1]}"
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

    return pairs((name, cell(value)) for name, value in description.items())


def list_models(directory: Path) -> list[dict[str, Any]]:
    """Return the models in ``directory`` (or the model that it is), reading only headers of files.

    Each entry has the kind and, where the files define them, parameters, family and more. A model that cannot be read has
    ``error`` instead.

    Raises:
        UserError: the path does not exist or contains no model.
    """
    if not directory.exists():
        raise UserError(f"{directory}: no such directory")
    entries = [_model_entry(path, kind) for path, kind in _find_models(directory, MOST_LEVELS)]
    if not entries:
        raise UserError(
            f"{directory}: contains no model: no config.json, .gguf, adapter_config.json or manifest.json, up to {MOST_LEVELS} "
            "levels deep"
        )
    return entries[:MOST_MODELS]


def _find_models(path: Path, levels: int) -> Iterator[tuple[Path, str]]:
    """Yield the models in a directory with their kinds. A model contains no others."""
    if path.is_file():
        if gguf_file(path):
            yield path, "GGUF file"
    elif (path / MANIFEST).is_file():
        yield path, "checkpoint"
    elif (path / CONFIG_FILE).is_file():
        yield path, "adapter"
    elif is_hugging_face(path) and not gguf_file(path):
        yield path, "Hugging Face directory"
    elif path.is_dir():
        yield from ((file, "GGUF file") for file in gguf_files(path))
        for child in sorted(path.iterdir()):
            if levels and child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _find_models(child, levels - 1)


def _model_entry(path: Path, kind: str) -> dict[str, Any]:
    files = [path] if path.is_file() else [Path(entry) for entry in os.scandir(path)]
    size = sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES and file.is_file())
    entry: dict[str, Any] = {"path": str(path), "kind": kind, "bytes": size}
    try:
        if kind == "adapter":
            content = read_json(path / CONFIG_FILE)
            return entry | {"base": content.get("base_model_name_or_path"), "tuner": content.get("peft_type")}
        if kind == "checkpoint":
            return entry | _checkpoint_entry(path)
        model = read_model_config(path)
        return entry | {
            "family": family_in(path).name,
            **_model_sizes(model),
            "context": model.max_position_embedding,
            "dtype": _weight_type(path),
            "tokenizer": tokenizer_in(path) is not None,
        }
    except UserError as error:
        return entry | {"error": str(error)}


def _checkpoint_entry(path: Path) -> dict[str, Any]:
    state = read_json(path / "state.json")
    content = (((state.get("identity") or {}).get("model") or {}).get("config")) or {}
    try:
        model = ModelConfig.model_validate(content)
    except ValueError:
        return {"step": state.get("step")}
    return {"step": state.get("step"), "family": model.model_type, **_model_sizes(model), "context": model.seq_length}


def _model_sizes(model: ModelConfig) -> dict[str, Any]:
    return {"parameters": model.base.parameter_count(), "layers": model.num_layers, "hidden_size": model.hidden_size}


def _weight_type(path: Path) -> str | None:
    """Return the type of the weights: the method of a quantized model, or the type that most bytes of a GGUF file have."""
    if quantization := quantization_in(path):
        return quantization.quant_method
    gguf = gguf_file(path)
    if gguf is None:
        content = read_json(path / "config.json")
        dtype = content.get("torch_dtype") or content.get("dtype")
        return dtype if isinstance(dtype, str) else None
    sizes: Counter[str] = Counter()
    for tensor in read_header(gguf).tensors.values():
        sizes[tensor.type] += tensor.size
    return max(sizes, key=lambda name: sizes[name], default="")
