"""Hugging Face directories: their weights by mindllm's names, and new directories that ``transformers`` loads.

Reading: one file or shards with an index, safetensors before pickled tensors; each tensor is read when it is needed. The suffix
of a file selects its reader. Writing: the directory is complete or absent, with one tensor in memory at a time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
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
from mindllm.errors import UserError
from mindllm.families.hugging_face import CONFIG, GENERATION_CONFIG, quantization_in, read_json
from mindllm.families.weight_table import EMBEDDING, HEAD, INDEX_FILE, WEIGHTS_FILE, index_of
from mindllm.gguf import SUFFIX, gguf_file, read_header
from mindllm.logs import warn_once
from mindllm.outside import read_text
from mindllm.train.checkpoint.loading import shape_differences
from mindllm.train.checkpoint.names import atomic_directory, refuse_existing
from mindllm.train.checkpoint.tensors import (
    Converted,
    HashingWriter,
    TensorSource,
    numpy_dtype,
    payload_bytes,
    stored_tensors,
    write_tensors,
)
from mindllm.weight_files.family_weights import FamilyWeights, split_fused_experts
from mindllm.weight_files.gguf_file import gguf_tensors
from mindllm.weight_files.mindspore_file import checkpoint_tensors
from mindllm.weight_files.pickled import pickled_tensors
from mindllm.weight_files.quantized import substitute_matrices

logger = logging.getLogger(__name__)
# suffix: (kind of file, its reader)
READERS: dict[str, tuple[str, Callable[[Path], Mapping[str, Any]]]] = {
    ".safetensors": ("a safetensors file", stored_tensors),
    ".ckpt": ("a checkpoint file of MindSpore", checkpoint_tensors),
    ".bin": ("a file of pickled tensors", pickled_tensors),
    ".pt": ("a file of pickled tensors", pickled_tensors),
    ".pth": ("a file of pickled tensors", pickled_tensors),
}
PICKLED_FILE = "pytorch_model.bin"
COMPUTED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")  # tables in old files that every model computes
SHARD_NAME = "model-{number:05d}-of-{count:05d}.safetensors"
FRAMEWORK = "pt"  # transformers requires PyTorch's layout of tensors


def read_tensor_file(path: Path) -> dict[str, Any]:
    """Return the tensors of a file by their names in it, each a ``TensorSource`` with its ``path``. Values are not read.

    Raises:
        UserError: the file is missing, damaged, has an unknown format, or contains anything except tensors.
    """
    if gguf_file(path):
        return gguf_tensors(path)
    if path.suffix not in READERS:
        raise UserError(f"{path}: not a file of weights; supported are {', '.join(READERS)}")
    kind, read = READERS[path.suffix]
    try:
        return dict(read(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not {kind}, or incomplete ({error}); download it again") from None


def read_tensor_files(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the tensors of several files.

    Raises:
        UserError: a file is damaged, or two files have a tensor of the same name.
    """
    tensors: dict[str, Any] = {}
    for path in paths:
        for name, tensor in read_tensor_file(path).items():
            if name in tensors:
                raise UserError(f"{path}: tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
    return tensors


def read_tensor_directory(directory: Path) -> dict[str, Any]:
    """Return every tensor of a directory by its name in the files, except tables that every model computes.

    Raises:
        UserError: files are missing or damaged.
    """
    gguf = gguf_file(directory)
    tensors = gguf_tensors(gguf) if gguf else read_tensor_files(weight_files(directory))
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(COMPUTED)}


def weight_files(directory: Path) -> list[Path]:
    """Return the files of weights in ``directory``, in order. As in transformers, a single file takes precedence over shards.

    Raises:
        UserError: files are missing, or the index names files in other directories.
    """
    if gguf := gguf_file(directory):
        return sorted({tensor.path for tensor in read_header(gguf).tensors.values()})
    for file in (WEIGHTS_FILE, PICKLED_FILE):
        index = directory / index_of(file)
        if (directory / file).is_file():
            if index.is_file():
                warn_once(__name__, f"{directory}: reading {file}; {index.name} is ignored, as in transformers")
            return [directory / file]
        if index.is_file():
            return shard_files(index, read_json(index).get("weight_map"))
    if ggufs := sorted(path.name for path in directory.glob(f"*{SUFFIX}")):
        raise UserError(f"{directory}: its weights are in GGUF; pass one of its files, such as {directory / ggufs[0]}")
    unlisted = sorted(
        path.name for path in directory.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth")
    )
    hint = f"; it has {', '.join(unlisted[:3])} without an index" if unlisted else ""
    raise UserError(f"{directory}: has no {WEIGHTS_FILE} and no {INDEX_FILE} with shards, nor {PICKLED_FILE}{hint}")


def shard_files(index: Path, weight_map: object) -> list[Path]:
    """Return the files that ``weight_map`` of an index file lists. Raises UserError like :func:`weight_files`."""

    def is_plain(name: object) -> bool:
        return isinstance(name, str) and Path(name).name == name

    if not isinstance(weight_map, dict) or not weight_map or not all(map(is_plain, weight_map.values())):
        raise UserError(f"{index}: weight_map must give the file in this directory of every tensor")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(
            f"{index.parent}: missing {', '.join(missing)}, listed in {index.name}; download the files again"
        )
    return [index.parent / name for name in names]


def python_files(directory: Path) -> list[str]:
    """Return the files of Python code in a model directory, which are never run."""
    return sorted(path.name for path in directory.glob("*.py"))


def read_hugging_face(directory: Path | str, model: ModelConfig) -> dict[str, Converted]:
    """Return the weights of ``model`` in fp32 by mindllm's names. Quantized matrices are dequantized when they are read.

    Raises:
        UserError: a file is damaged, or tensors are missing, surplus or misshapen; names them as the files do.
    """
    directory = Path(directory)
    family = FamilyWeights(model)
    table = family.table
    tensors = read_tensor_directory(directory)
    if section := quantization_in(directory):
        transposed = {name for name, weight in family.weights.items() if weight.transposed}
        tensors = substitute_matrices(directory, tensors, section, transposed)
    if table.further_layers:
        tensors = _drop_extra_layers(tensors, directory, model, family)
    if table.computed:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(table.computed)}
    # Files may leave out the prefix of names.
    unprefixed = {weight.theirs for weight in table.weights if not weight.theirs.startswith(table.prefix)}
    tensors = {
        name if name.startswith(table.prefix) or name in unprefixed else table.prefix + name: tensor
        for name, tensor in tensors.items()
    }
    tensors = split_fused_experts(tensors, table)
    if model.tie_word_embeddings:
        # Some files repeat a tied head. A head with other values is reported as surplus.
        head, embedding = table.theirs(HEAD), table.theirs(EMBEDDING)
        if head in tensors and embedding in tensors and np.array_equal(tensors[head], tensors[embedding]):
            del tensors[head]
    if lines := shape_differences(tensors, family.shapes()):
        raise UserError(
            f"{directory} does not match the weights of the model:\n  "
            + "\n  ".join(lines)
            + "\ndownload the files again, or pass the matching architecture"
        )
    weights = family.read(tensors)
    return {name: Converted(file_name, source, np.dtype(np.float32)) for name, (file_name, source) in weights.items()}


def _drop_extra_layers(
    tensors: dict[str, TensorSource], directory: Path, model: ModelConfig, family: FamilyWeights
) -> dict[str, TensorSource]:
    """Drop prediction layers that the model does not have, and tensors that its prediction layers share with others.

    Raises:
        UserError: a prediction layer is missing.
    """
    matches = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in tensors}
    layers = {name: int(match[1]) for name, match in matches.items() if match}
    present = {*layers.values()}
    if missing := [layer for layer in range(model.num_layers, model.placed_layers) if layer not in present]:
        raise UserError(
            f"{directory} does not have prediction layer {missing[0]}; write model.model_config."
            f"num_nextn_predict_layers: {missing[0] - model.num_layers}"
        )
    if extra := sorted(layer for layer in present if layer >= model.placed_layers):
        logger.info("%s: prediction layers from %d on are not read", directory, extra[0])
    return {
        name: tensor
        for name, tensor in tensors.items()
        if layers.get(name, 0) < model.placed_layers and name not in family.copies
    }


@dataclass(frozen=True)
class QuantizedExport:
    """Matrices that a directory has in codes.

    Attributes:
        config: ``quantization_config`` of the ``config.json``.
        tensors: for each matrix, by its name in the files, the tensors that replace it.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, TensorSource]]


def write_weights(
    directory: Path | str,
    model: ModelConfig,
    weights: Mapping[str, TensorSource],
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Tokenizer | None = None,
    quantized: QuantizedExport | None = None,
    chat_template: str = "",
) -> Path:
    """Write a Hugging Face directory: ``config.json``, the weights in files of at most ``max_shard_bytes``, the tokenizer.

    A tensor larger than ``max_shard_bytes`` has its own file.

    Arguments:
        weights: by mindllm's names; each becomes an array when it is written.
        dtype: float32, float16 or bfloat16.
        quantized: matrices to write in codes.
        chat_template: file of the chat template that the model was trained with; empty: the tokenizer's.

    Raises:
        UserError: the directory exists and is not empty, no family has this model, or a value is too large for dtype.
        RunFailed: the disk is full or reports an error. The directory is not created in any of these cases.
    """
    directory = Path(directory)
    refuse_existing(directory)
    special_tokens = _special_tokens(model, tokenizer)
    content = config_json(model, dtype, special_tokens)
    if quantized is not None:
        content[KEY] = dict(quantized.config)
    # Cut the tensors into files in the order of the layers, with the tensors of one matrix together.
    groups: list[dict[str, TensorSource]] = [{}]
    for name, source in FamilyWeights(model).write(weights).items():
        matrix: dict[str, TensorSource] = {name: Converted(name, source, numpy_dtype(dtype))}
        if quantized is not None and name in quantized.tensors:
            matrix = dict(quantized.tensors[name])
        if groups[-1] and payload_bytes(groups[-1]) + payload_bytes(matrix) > max_shard_bytes:
            groups.append({})
        groups[-1] |= matrix
    files = {WEIGHTS_FILE: groups[0]}
    if len(groups) > 1:
        files = {SHARD_NAME.format(number=n + 1, count=len(groups)): group for n, group in enumerate(groups)}
    total = sum(map(payload_bytes, groups))
    with atomic_directory(directory) as temporary:
        free = shutil.disk_usage(temporary).free
        if free < total:
            raise OSError(f"it needs {total / 1e6:.1f} MB and {free / 1e6:.1f} MB are free")
        for file_name, tensors in files.items():
            write_file(temporary / file_name, partial(write_tensors, tensors=tensors, framework=FRAMEWORK))
        if len(files) > 1:
            places = {name: file_name for file_name, tensors in files.items() for name in tensors}
            write_json(temporary / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
        write_json(temporary / CONFIG, content)
        ends = end_ids(model.eos_token_ids, tokenizer, chat_template)
        write_json(temporary / GENERATION_CONFIG, {**special_tokens, "eos_token_id": _single_or_list(ends)})
        if tokenizer is not None:
            copy_tokenizer(tokenizer, temporary)
        if chat_template:
            text = read_text(Path(chat_template))
            (temporary / "chat_template.jinja").write_text(text, encoding="utf-8")
    return directory


def _special_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the special tokens of the model, or of the tokenizer where the model has none."""
    tokens = {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": _single_or_list(model.eos_token_ids),
        "pad_token_id": model.pad_token_id,
    }
    if tokenizer is None:
        return tokens
    defaults = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {key: defaults[key] if value is None else value for key, value in tokens.items()}


def _single_or_list(ids: Iterable[int]) -> int | list[int] | None:
    """Return the only id, a list of several, or None."""
    ids = list(ids)
    return ids if len(ids) > 1 else next(iter(ids), None)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a new JSON file and wait until it is on the disk."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_file(path, lambda writer: writer.write(text.encode()))


def write_file(path: Path, write: Callable[[HashingWriter], None]) -> None:
    """Create a new file with ``write`` and wait until it is on the disk."""
    with open(path, "xb") as file:
        write(HashingWriter(file))
        file.flush()
        os.fsync(file.fileno())
