"""Weights of a Hugging Face directory, under our names: safetensors files only, each tensor read when it is needed.

``model.safetensors``, or shards that ``model.safetensors.index.json`` lists. Files of pickled tensors are refused: to read one
is to run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from mindllm.config import ModelConfig
from mindllm.config.hugging_face import read_json
from mindllm.errors import UserError
from mindllm.models.families.llama import HUGGING_FACE
from mindllm.models.weight_shapes import weight_shapes
from mindllm.train.checkpoint.converted import Converted
from mindllm.train.checkpoint.loading import differences
from mindllm.train.checkpoint.tensors import StoredTensor, stored_tensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")
FLOATING = ("float32", "float16", "bfloat16", "float64")
COMPUTED = ".rotary_emb.inv_freq"  # tables that old files hold and every model computes
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def weight_files(directory: Path) -> list[Path]:
    """The files of weights in ``directory``, in order.

    Raises:
        UserError: there are none, shards of the index are missing, or the weights are pickled.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        if (directory / WEIGHTS_FILE).is_file():
            return [directory / WEIGHTS_FILE]
        raise UserError(_why_none(directory))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(_is_plain_name(name) for name in places.values()):
        raise UserError(f"{index}: weight_map must give the file in this directory of every tensor")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(f"{directory}: missing {', '.join(missing)}, which {INDEX_FILE} lists; get the files again")
    return [directory / name for name in names]


def read_weights(directory: Path | str, model: ModelConfig) -> dict[str, Converted]:
    """The weights of ``model`` in fp32 by our names, none of them read yet.

    Raises:
        UserError: a file is damaged; or tensors are missing, surplus or misshapen, each named as the files name it.
    """
    directory = Path(directory)
    found = all_tensors(directory)
    if model.tie_word_embeddings:
        _drop_equal_head(found)
    expected = {HUGGING_FACE.theirs(name): (name, shape) for name, shape in weight_shapes(model).items()}
    lines = differences("weights", found, {name: (shape, _dtype(found, name)) for name, (_, shape) in expected.items()})
    if lines:
        raise UserError(
            f"{directory} does not hold the weights of the model:\n  "
            + "\n  ".join(lines)
            + "\nget the files again, or give the architecture they were made for"
        )
    return {ours: Converted(theirs, found[theirs], np.dtype(np.float32)) for theirs, (ours, _) in expected.items()}


def all_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the files of weights by the name it has there, but tables that every model computes.

    Raises:
        UserError: a file is damaged, or holds a tensor that another one holds too.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        for name, tensor in _tensors_of(path):
            if name in tensors:
                raise UserError(f"{path}: tensor {name} is in {tensors[name].path.name}, too")
            tensors[name] = tensor
    return tensors


def _tensors_of(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        tensors = stored_tensors(path)
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not a safetensors file, or a part of one ({error}); get it again") from None
    return ((name, tensor) for name, tensor in tensors.items() if not name.endswith(COMPUTED))


def _drop_equal_head(found: dict[str, StoredTensor]) -> None:
    """Some files of a model with a tied head hold it again; one that says something else is surplus."""
    if HEAD in found and EMBEDDING in found and np.array_equal(found[HEAD], found[EMBEDDING]):
        del found[HEAD]


def _dtype(found: Mapping[str, StoredTensor], name: str) -> np.dtype:
    """The dtype that a tensor is expected to have: its own, if its values are numbers with a fraction."""
    here = name in found and found[name].dtype.name in FLOATING
    return found[name].dtype if here else np.dtype(np.float32)


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _why_none(directory: Path) -> str:
    pickled = [path.name for pattern in PICKLED for path in sorted(directory.glob(pattern))]
    if pickled and not any(directory.glob("*.safetensors")):
        return (
            f"{directory}: its weights are pickled ({pickled[0]}), and to open a pickle is to run it; get the files in "
            "safetensors, or write them with transformers: model.save_pretrained(directory, safe_serialization=True)"
        )
    return f"{directory}: has no {WEIGHTS_FILE} and no {INDEX_FILE} with shards"
