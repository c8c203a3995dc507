"""What a Hugging Face directory or a checkpoint holds: architecture, files, types of the weights."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from mindllm.config import ModelConfig, is_hugging_face, read_model_config, tokenizer_in
from mindllm.data import load_tokenizer
from mindllm.gguf.header import gguf_file
from mindllm.terminal.tables import pairs
from mindllm.train.checkpoint import load_checkpoint
from mindllm.train.checkpoint.loading import model_of
from mindllm.train.checkpoint.manifest import WEIGHTS, read_manifest
from mindllm.train.checkpoint.tensors import TensorSource, payload_bytes, stored_tensors
from mindllm.weight_files.files import code_of, weight_files
from mindllm.weight_files.hugging_face import read_weights
from mindllm.weight_files.mindformers import is_mindformers, mindformers_files, mindformers_tensors

SHOWN = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "n_kv_heads", "head_dim", "vocab_size")

MOST_NAMED = 3


def describe(path: Path) -> dict[str, Any]:
    """Checks the weights at ``path`` against its architecture and returns what they are; errors as those of loading."""
    if is_hugging_face(path):
        model, kind = read_model_config(path), "GGUF file" if gguf_file(path) else "Hugging Face directory"
        weights: dict[str, Any] = {name: item.source for name, item in read_weights(path, model).items()}
        files = [file.name for file in weight_files(path)]
        vocabulary = tokenizer_in(path)
    elif is_mindformers(path):
        return _description_without_architecture(path)
    else:
        checkpoint = load_checkpoint(path, option="PATH", with_optimizer=False, read=stored_tensors)
        model, kind, weights = model_of(checkpoint), f"checkpoint of step {checkpoint.step}", checkpoint.weights
        files = [file.name for file in read_manifest(path).files if file.role == WEIGHTS]
        recorded = Path(checkpoint.state.get("tokenizer") or "")
        vocabulary = recorded if recorded.is_file() else None
    return {"path": str(path), "kind": kind, **_architecture(model), **_sizes(weights), "files": files} | {
        "code_not_run": code_of(path),
        "tokenizer": str(vocabulary) if vocabulary else None,
        "tokenizer_vocab_size": load_tokenizer(vocabulary).vocab_size if vocabulary else None,
    }


def _description_without_architecture(path: Path) -> dict[str, Any]:
    """Of weights of MindFormers: tensors, optimizer states among them, as the files name them."""
    tensors = mindformers_tensors(path)
    files = [str(file.relative_to(path)) if path.is_dir() else file.name for file in mindformers_files(path)]
    return {
        "path": str(path),
        "kind": "weights of MindFormers",
        **_sizes(tensors),
        "names": list(tensors),
        "files": files,
    }


def description_table(description: dict[str, Any]) -> RichTable:
    """Return a description as a table, a row for each figure."""
    return pairs((name, _cell(value)) for name, value in description.items())


def _architecture(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    biases = [key for key in ("qkv_has_bias", "attn_proj_has_bias") if getattr(model, key)]
    return {
        **{key: getattr(model, key) for key in SHOWN},
        "max_position_embedding": model.max_position_embedding,
        "theta": model.theta,
        "rope_scaling": scaling.type if scaling else None,
        "tie_word_embeddings": model.tie_word_embeddings,
        "biases": biases,
    }


def _sizes(weights: dict[str, TensorSource]) -> dict[str, Any]:
    types = Counter(str(tensor.dtype) for tensor in weights.values())
    return {
        "parameters": sum(math.prod(tensor.shape) for tensor in weights.values()),
        "bytes": payload_bytes(weights),
        "tensors": dict(types),
    }


def _cell(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(value) if len(value) <= MOST_NAMED else f"{len(value)}: {value[0]} to {value[-1]}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
