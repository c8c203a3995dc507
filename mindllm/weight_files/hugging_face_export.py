"""Writes a Hugging Face directory that ``transformers`` loads: whole or not at all, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.config import ModelConfig, config_json
from mindllm.config.quantization import KEY
from mindllm.data.chat.instruction import end_ids
from mindllm.data.tokenizers.files import copy_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.families.hugging_face import CONFIG, GENERATION_CONFIG
from mindllm.families.weight_names import INDEX_FILE, WEIGHTS_FILE
from mindllm.outside import read_text
from mindllm.train.checkpoint.names import refuse_existing, whole_directory
from mindllm.train.checkpoint.tensors import (
    Converted,
    HashingWriter,
    TensorSource,
    numpy_dtype,
    payload_bytes,
    write_tensors,
)
from mindllm.weight_files.family_weights import FamilyWeights

SHARD_NAME = "model-{number:05d}-of-{count:05d}.safetensors"
FRAMEWORK = "pt"  # the layout of the tensors, which transformers asks for: that of PyTorch
Shards = dict[str, dict[str, TensorSource]]  # file name: tensors by their names


@dataclass(frozen=True)
class InCodes:
    """Matrices of a directory that are written in codes.

    Attributes:
        config: ``quantization_config`` of the ``config.json``.
        tensors: in the place of each matrix, by its name in the files, tensors by theirs.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, TensorSource]]


def export_hugging_face(
    directory: Path | str,
    model: ModelConfig,
    weights: Mapping[str, TensorSource],
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Tokenizer | None = None,
    codes: InCodes | None = None,
    chat_template: str = "",
) -> Path:
    """Writes ``config.json``, the weights in files of at most ``max_shard_bytes``, and the files of the tokenizer.

    A tensor larger than ``max_shard_bytes`` has a file of its own.

    Arguments:
        weights: by our names; each becomes an array when its turn comes.
        dtype: float32, float16 or bfloat16.
        codes: what is written in codes instead.
        chat_template: file of the chat template that the model was trained with; empty: the tokenizer's own.

    Raises:
        UserError: the directory is there and not empty, the model is no Llama of Hugging Face, or a value too large for dtype.
        RunFailed: the disk is full or refuses. Nothing is left of the directory in any of these cases.
    """
    directory = Path(directory)
    refuse_existing(directory)
    content = config_json(model, dtype, _special_tokens(model, tokenizer))
    if codes is not None:
        content[KEY] = dict(codes.config)
    tensors = _tensors(model, weights, numpy_dtype(dtype), codes.tensors if codes is not None else {})
    shards = _shards(tensors, max_shard_bytes)
    with whole_directory(directory) as temporary:
        _refuse_if_full(temporary, shards)
        _write_shards(temporary, shards)
        write_json(temporary / CONFIG, content)
        write_json(temporary / GENERATION_CONFIG, _generation_config(model, tokenizer, chat_template))
        if tokenizer is not None:
            copy_tokenizer(tokenizer, temporary)
        if chat_template:
            text = read_text(Path(chat_template))
            (temporary / "chat_template.jinja").write_text(text, encoding="utf-8")
    return directory


def _generation_config(model: ModelConfig, tokenizer: Tokenizer | None, chat_template: str) -> dict[str, Any]:
    """Return the special tokens; generation ends at those of the model, the tokenizer and the chat template."""
    ends = end_ids(model.eos_token_ids, tokenizer, chat_template)
    return {
        **_special_tokens(model, tokenizer),
        "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
    }


def _special_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    ends = list(model.eos_token_ids)
    own = {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": model.pad_token_id,
    }
    if tokenizer is None:
        return own
    named = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {key: named[key] if value is None else value for key, value in own.items()}


def _tensors(
    model: ModelConfig,
    weights: Mapping[str, TensorSource],
    dtype: np.dtype,
    replaced: Mapping[str, Mapping[str, TensorSource]],
) -> Iterator[dict[str, TensorSource]]:
    """Tensors in the order of the layers; those of one matrix together."""
    for name, source in FamilyWeights(model).write(weights).items():
        yield dict(replaced[name]) if name in replaced else {name: Converted(name, source, dtype)}


def _shards(tensors: Iterable[dict[str, TensorSource]], limit: int) -> Shards:
    """Tensors cut into files of at most ``limit`` bytes."""
    groups: list[dict[str, TensorSource]] = [{}]
    for together in tensors:
        if groups[-1] and payload_bytes(groups[-1]) + payload_bytes(together) > limit:
            groups.append({})
        groups[-1] |= together
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {SHARD_NAME.format(number=index + 1, count=len(groups)): group for index, group in enumerate(groups)}


def _refuse_if_full(directory: Path, shards: Shards) -> None:
    needed = sum(map(payload_bytes, shards.values()))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free")


def _write_shards(directory: Path, shards: Shards) -> None:
    for name, tensors in shards.items():
        write_file(directory / name, partial(write_tensors, tensors=tensors, framework=FRAMEWORK))
    if len(shards) > 1:
        places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        total = sum(map(payload_bytes, shards.values()))
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file of JSON that was not there, and waits until it is on the disk."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_file(path, lambda writer: writer.write(text.encode()))


def write_file(path: Path, write: Callable[[HashingWriter], None]) -> None:
    """Has ``write`` write a file that was not there, and waits until it is on the disk."""
    with open(path, "xb") as file:
        write(HashingWriter(file))
        file.flush()
        os.fsync(file.fileno())
