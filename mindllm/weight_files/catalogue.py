"""What lies in a directory of models: one entry for each model, by its files' headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindllm.config import ModelConfig, is_hugging_face, read_model_config, tokenizer_in
from mindllm.errors import UserError
from mindllm.families.hugging_face import family_in, quantization_in, read_json
from mindllm.gguf.header import gguf_file, gguf_files, read_header

ADAPTER, MANIFEST, STATE = "adapter_config.json", "manifest.json", "state.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
DEEPEST = 3  # directories in directories: an organisation's models, the checkpoints of a run
MOST = 500


def models_in(directory: Path) -> list[dict[str, Any]]:
    """Return the models in ``directory``, or the one it is: its kind, and where they can be told parameters, family and the rest.

    A model that cannot be read has ``error`` instead.

    Raises:
        UserError: there is no such directory or file, or no model in it.
    """
    if not directory.exists():
        raise UserError(f"{directory}: no such directory")
    found = [_entry(path, kind) for path, kind in _find(directory, DEEPEST)]
    if not found:
        raise UserError(
            f"{directory}: holds no model: no config.json, .gguf, adapter_config.json or manifest.json, in it or {DEEPEST} deep"
        )
    return found[:MOST]


def _find(path: Path, depth: int) -> Iterator[tuple[Path, str]]:
    kind = _kind(path)
    if kind:
        yield path, kind
        return
    if not path.is_dir():
        return
    yield from ((file, "GGUF file") for file in gguf_files(path))
    for below in sorted(path.iterdir()):
        if depth and below.is_dir() and not below.is_symlink() and not below.name.startswith("."):
            yield from _find(below, depth - 1)


def _kind(path: Path) -> str:
    if path.is_file():
        return "GGUF file" if gguf_file(path) else ""
    if (path / MANIFEST).is_file():
        return "checkpoint"
    if (path / ADAPTER).is_file():
        return "adapter"
    return "Hugging Face directory" if is_hugging_face(path) and not gguf_file(path) else ""


def _entry(path: Path, kind: str) -> dict[str, Any]:
    told: dict[str, Any] = {"path": str(path), "kind": kind, "bytes": _bytes(path)}
    try:
        if kind == "adapter":
            content = read_json(path / ADAPTER)
            return told | {"base": content.get("base_model_name_or_path"), "tuner": content.get("peft_type")}
        if kind == "checkpoint":
            return told | _of_checkpoint(path)
        return told | _of_directory(path)
    except UserError as error:
        return told | {"error": str(error)}


def _of_directory(path: Path) -> dict[str, Any]:
    model, quantization = read_model_config(path), quantization_in(path)
    gguf = gguf_file(path)
    dtype = quantization.quant_method if quantization else _dtype(path) if gguf is None else _most_of(gguf)
    return {
        "family": family_in(path).name,
        **_of_model(model),
        "context": model.max_position_embedding,
        "dtype": dtype,
        "tokenizer": tokenizer_in(path) is not None,
    }


def _of_checkpoint(path: Path) -> dict[str, Any]:
    state = read_json(path / STATE)
    content = (((state.get("identity") or {}).get("model") or {}).get("config")) or {}
    try:
        model = ModelConfig.model_validate(content)
    except ValueError:
        return {"step": state.get("step")}
    return {"step": state.get("step"), "family": model.model_type, **_of_model(model), "context": model.seq_length}


def _of_model(model: ModelConfig) -> dict[str, Any]:
    return {"parameters": model.base.parameter_count(), "layers": model.num_layers, "hidden_size": model.hidden_size}


def _most_of(gguf: Path) -> str:
    """The type that most bytes of a GGUF file are of."""
    sizes: dict[str, int] = {}
    for tensor in read_header(gguf).tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size
    return max(sizes, key=lambda name: sizes[name], default="")


def _dtype(path: Path) -> str | None:
    content = read_json(path / "config.json")
    found = content.get("torch_dtype") or content.get("dtype")
    return found if isinstance(found, str) else None


def _bytes(path: Path) -> int:
    """The size of the files of weights."""
    files = [path] if path.is_file() else [Path(entry) for entry in os.scandir(path)]
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHTS and file.is_file())
