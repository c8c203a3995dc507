"""Weights that MindFormers saved, under our names: a file, a directory of shards, or the directories of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.families.hugging_face import CONFIG, read_json
from mindllm.mindformers.weight_names import Origin, Rows, origins, rows_of
from mindllm.train.checkpoint.loading import differences, floating_dtype
from mindllm.train.checkpoint.manifest import MANIFEST
from mindllm.train.checkpoint.tensors import Converted, TensorSource
from mindllm.weight_files.files import files_of_map, tensors_of_files
from mindllm.weight_files.ranks import rank_directories, rank_files, strategy_files, tensors_of_ranks

NAME_MAP = "param_name_map.json"  # what MindSpore's unified_safetensors writes beside its files
SUFFIXES = (".ckpt", ".safetensors")


@dataclass(frozen=True)
class CutRows:
    """Some rows of a matrix or of a vector, of each of its groups; read when it is asked for its array."""

    source: TensorSource
    rows: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.groups * (self.rows.stop - self.rows.start), *self.source.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        values = np.asarray(self.source)
        grouped = values.reshape(self.rows.groups, self.rows.block, *values.shape[1:])
        return grouped[:, self.rows.start : self.rows.stop].reshape(self.shape).astype(dtype or self.dtype, copy=False)


def is_mindformers(path: Path | str) -> bool:
    """Whether ``path`` is weights as MindFormers saves them: neither a checkpoint of ours nor a model of Hugging Face."""
    path = Path(path)
    if path.is_file():
        return path.suffix in SUFFIXES and not (path.parent / MANIFEST).exists()
    if not path.is_dir() or (path / MANIFEST).exists() or (path / CONFIG).is_file():
        return False
    return bool(rank_directories(path)) or any(entry.suffix in SUFFIXES for entry in path.iterdir())


def mindformers_files(path: Path) -> list[Path]:
    """The files that :func:`mindformers_tensors` reads, in order; errors as those."""
    if path.is_file():
        return [path]
    if rank_directories(path):
        return list(rank_files(path).values())
    if (path / NAME_MAP).is_file():
        content = read_json(path / NAME_MAP)
        return files_of_map(path / NAME_MAP, content.get("weight_map", content))
    checkpoints = sorted(path.glob("*.ckpt"))
    if len(checkpoints) > 1:
        names = ", ".join(file.name for file in checkpoints[:3])
        raise UserError(f"{path}: holds {len(checkpoints)} files of MindSpore ({names}); give one of them")
    return checkpoints or sorted(path.glob("*.safetensors"))


def mindformers_tensors(path: Path) -> dict[str, Any]:
    """Every tensor at ``path`` by the name MindFormers gives it, whole, none of them read yet.

    Raises:
        UserError: files are missing or damaged, or parts make no whole.
    """
    return (
        tensors_of_ranks(path)
        if path.is_dir() and rank_directories(path)
        else tensors_of_files(mindformers_files(path))
    )


def read_mindformers(path: Path | str, model: ModelConfig) -> dict[str, Converted]:
    """The weights of ``model`` in fp32 by our names; what else a training run saved (optimizer, counters) is left.

    Raises:
        UserError: a file is damaged; or tensors are missing, surplus or misshapen, each named as the files name it.
    """
    path = Path(path)
    found = mindformers_tensors(path)
    shapes = model.architecture.weight_shapes()
    places = origins(model, shapes, found)
    wanted = {origin.name for origin in places.values()}
    weights = {name: tensor for name, tensor in found.items() if not _belongs_to_training(name, tensor, wanted)}
    expected = {origin.name: _whole_shape(origin, shapes[name], model) for name, origin in places.items()}
    lines = differences(
        "weights", weights, {name: (shape, floating_dtype(weights, name)) for name, shape in expected.items()}
    )
    if lines:
        hint = _hint(path, lines)
        raise UserError(f"{path} does not hold the weights of the model:\n  " + "\n  ".join(lines) + f"\n{hint}")
    return {
        ours: Converted(origin.name, _piece(weights[origin.name], origin, model), np.dtype(np.float32))
        for ours, origin in places.items()
    }


def _belongs_to_training(name: str, tensor: TensorSource, wanted: set[str]) -> bool:
    """State of the optimizer (``adam_m.model...``) and counters (``global_step``), which files of training runs hold too."""
    return name not in wanted and (name.partition(".")[2] in wanted or int(np.prod(tensor.shape)) <= 1)


def _piece(source: TensorSource, origin: Origin, model: ModelConfig) -> TensorSource:
    return source if origin.piece is None else CutRows(source, rows_of(origin.piece, model))


def _whole_shape(origin: Origin, shape: tuple[int, ...], model: ModelConfig) -> tuple[int, ...]:
    """The shape of the tensor that holds a weight of ``shape``."""
    if origin.piece is None:
        return shape
    rows = rows_of(origin.piece, model)
    return (rows.groups * rows.block, *shape[1:])


def _hint(path: Path, lines: list[str]) -> str:
    """What to do about differences, as far as their kind tells."""
    if any(".w_qkv." in line or ".w_gate_hidden." in line for line in lines):
        return (
            "it was saved with qkv_concat, whose order of rows differs between releases of MindFormers; save it without, or "
            "export it to Hugging Face with the release that wrote it"
        )
    if path.is_dir() and rank_directories(path) and not strategy_files(path, len(rank_directories(path))):
        return (
            f"its ranks may hold parts: put the strategy files of the run (ckpt_strategy_rank_0.ckpt and so on) into "
            f"{path.parent / 'strategy'}, or merge them with mindspore.unified_safetensors"
        )
    return "get the files again, or give the architecture they were made for"
