"""The weights of a Hugging Face directory: one file or shards with their index, safetensors before pickled ones.

Which reader one file of weights wants stands in its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.families.hugging_face import read_json
from mindllm.families.weight_names import INDEX_FILE, WEIGHTS_FILE, index_of
from mindllm.gguf.header import SUFFIX, gguf_file, read_header
from mindllm.logs import warn_once
from mindllm.train.checkpoint.tensors import stored_tensors
from mindllm.weight_files.gguf_file import gguf_tensors
from mindllm.weight_files.mindspore_file import checkpoint_tensors
from mindllm.weight_files.pickled import pickled_tensors

# suffix: (what such a file is, its reader)
READERS: dict[str, tuple[str, Callable[[Path], Mapping[str, Any]]]] = {
    ".safetensors": ("a safetensors file", stored_tensors),
    ".ckpt": ("a checkpoint file of MindSpore", checkpoint_tensors),
    ".bin": ("a file of pickled tensors", pickled_tensors),
    ".pt": ("a file of pickled tensors", pickled_tensors),
    ".pth": ("a file of pickled tensors", pickled_tensors),
}
PICKLED_FILE = "pytorch_model.bin"
COMPUTED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")  # tables that old files hold and every model computes


def tensors_of_file(path: Path) -> dict[str, Any]:
    """The tensors of a file by the names it gives them, each a ``TensorSource`` with its ``path``; none is read yet.

    Raises:
        UserError: no such file, no format known here, a damaged file, or one that holds more than tensors.
    """
    if gguf_file(path):
        return gguf_tensors(path)
    if path.suffix not in READERS:
        raise UserError(f"{path}: not a file of weights; known are {', '.join(READERS)}")
    kind, read = READERS[path.suffix]
    try:
        return dict(read(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not {kind}, or a part of one ({error}); get it again") from None


def weight_files(directory: Path) -> list[Path]:
    """Return the files of weights in ``directory``, in order. One file goes before shards, as in transformers.

    Raises:
        UserError: there are none, shards of the index are missing, or it names files elsewhere.
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
            return shards_of(index)
    found = sorted(path.name for path in directory.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if ggufs := sorted(path.name for path in directory.glob(f"*{SUFFIX}")):
        raise UserError(f"{directory}: its weights are in GGUF; give one of its files, such as {directory / ggufs[0]}")
    others = f"; it has {', '.join(found[:3])} without an index" if found else ""
    raise UserError(f"{directory}: has no {WEIGHTS_FILE} and no {INDEX_FILE} with shards, nor {PICKLED_FILE}{others}")


def shards_of(index: Path) -> list[Path]:
    """The files beside ``index`` that its ``weight_map`` lists; errors as :func:`weight_files`."""
    return files_of_map(index, read_json(index).get("weight_map"))


def files_of_map(index: Path, places: object) -> list[Path]:
    """The files that ``places``, a map of tensors in ``index``, names; errors as :func:`weight_files`."""
    directory = index.parent
    if not isinstance(places, dict) or not places or not all(_is_plain_name(name) for name in places.values()):
        raise UserError(f"{index}: weight_map must give the file in this directory of every tensor")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(f"{directory}: missing {', '.join(missing)}, which {index.name} lists; get the files again")
    return [directory / name for name in names]


def tensors_of_directory(directory: Path) -> dict[str, Any]:
    """Every tensor of the files of weights by the name it has there, but tables that every model computes.

    Raises:
        UserError: a file is damaged, or holds a tensor that another one holds too.
    """
    gguf = gguf_file(directory)
    tensors = gguf_tensors(gguf) if gguf else tensors_of_files(weight_files(directory))
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(COMPUTED)}


def tensors_of_files(paths: Iterable[Path]) -> dict[str, Any]:
    """The tensors of several files together; errors as :func:`tensors_of_directory`."""
    tensors: dict[str, Any] = {}
    for path in paths:
        for name, tensor in tensors_of_file(path).items():
            if name in tensors:
                raise UserError(f"{path}: tensor {name} is in {tensors[name].path.name}, too")
            tensors[name] = tensor
    return tensors


def code_of(directory: Path) -> list[str]:
    """The files of Python code in a model directory, which nothing here ever runs."""
    return sorted(path.name for path in directory.glob("*.py"))


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name
