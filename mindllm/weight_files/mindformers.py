"""MindFormers' checkpoints: a file, a directory of shards, or the directories of the ranks (``rank_0/net_rank_0-3_2.ckpt``).

Each rank saves the parts that it trains. MindFormers writes strategy files into the directory ``strategy`` next to the
checkpoints, which describe how each parameter was cut, so that the parts make whole tensors again.

MindSpore's ``node_strategy.proto`` gives every parameter a matrix of devices (slowest dimension first) and for every axis the
dimensions that cut it (counted from the fastest, -1: none). Optimizer parallelism cuts the first axis again, over the devices
that would otherwise have equal parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.families.hugging_face import CONFIG, read_json
from mindllm.mindformers.weight_names import Rows, origins, rows_of
from mindllm.outside import read_bytes
from mindllm.train.checkpoint.loading import shape_differences
from mindllm.train.checkpoint.manifest import MANIFEST
from mindllm.train.checkpoint.parts import join_parts
from mindllm.train.checkpoint.tensors import Converted, LazyTensor, TensorSource
from mindllm.weight_files.hugging_face import read_tensor_file, read_tensor_files, shard_files
from mindllm.weight_files.mindspore_file import Message

Shape = tuple[int, ...]
NAME_MAP = "param_name_map.json"  # written by MindSpore's unified_safetensors
SUFFIXES = (".safetensors", ".ckpt")
RANK = re.compile(r"rank_(\d+)")
STEP = re.compile(r"-(\d+)_(\d+)$")  # epoch and step in the epoch


def is_mindformers(path: Path | str) -> bool:
    """Return True if ``path`` has weights as MindFormers saves them, and is neither a checkpoint nor a Hugging Face model."""
    path = Path(path)
    if path.is_file():
        return path.suffix in SUFFIXES and not (path.parent / MANIFEST).exists()
    if not path.is_dir() or (path / MANIFEST).exists() or (path / CONFIG).is_file():
        return False
    return bool(rank_directories(path)) or any(entry.suffix in SUFFIXES for entry in path.iterdir())


def mindformers_files(path: Path) -> list[Path]:
    """Return the files that :func:`mindformers_tensors` reads, in order.

    Raises:
        UserError: files are missing.
    """
    if path.is_file():
        return [path]
    if rank_directories(path):
        return list(rank_files(path).values())
    if (path / NAME_MAP).is_file():
        content = read_json(path / NAME_MAP)
        return shard_files(path / NAME_MAP, content.get("weight_map", content))
    checkpoints = sorted(path.glob("*.ckpt"))
    if len(checkpoints) > 1:
        names = ", ".join(file.name for file in checkpoints[:3])
        raise UserError(f"{path}: has {len(checkpoints)} files of MindSpore ({names}); pass one of them")
    return checkpoints or sorted(path.glob("*.safetensors"))


def mindformers_tensors(path: Path) -> dict[str, Any]:
    """Return every whole tensor by MindFormers' name without reading the values.

    Raises:
        UserError: files are missing or damaged, or parts do not make a whole tensor.
    """
    if path.is_dir() and rank_directories(path):
        return join_rank_tensors(path)
    return read_tensor_files(mindformers_files(path))


def read_mindformers(path: Path | str, model: ModelConfig) -> dict[str, Converted]:
    """Return the weights of ``model`` by mindllm's names, in fp32. Optimizer state and counters in the files are ignored.

    Raises:
        UserError: a file is damaged, or tensors are missing, surplus or misshapen; names them as the files do.
    """
    path = Path(path)
    tensors = mindformers_tensors(path)
    shapes = model.architecture.weight_shapes()
    places = origins(model, shapes, tensors)
    names = {origin.name for origin in places.values()}
    weights = {name: tensor for name, tensor in tensors.items() if not _is_training_state(name, tensor, names)}
    expected: dict[str, Shape] = {}
    for name, origin in places.items():
        expected[origin.name] = shapes[name]
        if origin.piece is not None:  # the file has several weights as one matrix
            rows = rows_of(origin.piece, model)
            expected[origin.name] = (rows.groups * rows.block, *shapes[name][1:])
    if lines := shape_differences(weights, expected):
        raise UserError(
            f"{path} does not match the weights of the model:\n  " + "\n  ".join(lines) + f"\n{_suggest(path, lines)}"
        )
    converted = {}
    for name, origin in places.items():
        source = weights[origin.name]
        if origin.piece is not None:
            source = select_rows(source, rows_of(origin.piece, model))
        converted[name] = Converted(origin.name, source, np.dtype(np.float32))
    return converted


def _is_training_state(name: str, tensor: TensorSource, names: set[str]) -> bool:
    """Return True for optimizer state (``adam_m.model...``) and counters (``global_step``)."""
    return name not in names and (name.partition(".")[2] in names or int(np.prod(tensor.shape)) <= 1)


def select_rows(source: TensorSource, rows: Rows) -> LazyTensor:
    """Return some rows of each group of a matrix or a vector."""
    shape = (rows.groups * (rows.stop - rows.start), *source.shape[1:])

    def make() -> np.ndarray:
        values = np.asarray(source)
        grouped = values.reshape(rows.groups, rows.block, *values.shape[1:])
        return grouped[:, rows.start : rows.stop].reshape(shape)

    return LazyTensor(shape, source.dtype, make)


def _suggest(path: Path, lines: list[str]) -> str:
    """Return a fix for differences, depending on their kind."""
    if any(".w_qkv." in line or ".w_gate_hidden." in line for line in lines):
        return (
            "it was saved with qkv_concat, whose order of rows differs between releases of MindFormers; save it without, or "
            "export it to Hugging Face with the release that wrote it"
        )
    if path.is_dir() and rank_directories(path) and not strategy_files(path, len(rank_directories(path))):
        return (
            f"its ranks may have parts: put the strategy files of the run (ckpt_strategy_rank_0.ckpt and so on) into "
            f"{path.parent / 'strategy'}, or merge them with mindspore.unified_safetensors"
        )
    return "download the files again, or pass the matching architecture"


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut.

    Attributes:
        axes: for every axis the dimensions of ``devices`` that cut it, outer first, slowest is 0. Empty: whole everywhere.
        optimizer: the number of parts into which optimizer parallelism cuts the first axis of a device's part.
    """

    devices: Shape
    axes: tuple[Shape, ...]
    optimizer: int = 1

    def start(self, rank: int, shape: Shape) -> Shape:
        """Return where in the whole tensor the part of ``rank`` begins, which has ``shape``."""
        if not self.axes:
            return (0,) * len(shape)
        rank %= math.prod(self.devices)
        place = [rank // math.prod(self.devices[index + 1 :]) % size for index, size in enumerate(self.devices)]
        starts = [self._index(place, cut) * size for cut, size in zip(self.axes, shape, strict=True)]
        if self.optimizer > 1:
            first = self._index(place, self.axes[0]) * self.optimizer
            starts[0] = (first + self._index(place, self.replicated()) % self.optimizer) * shape[0]
        return tuple(starts)

    def full_shape(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor, of which each rank has a part of ``shape``."""
        if not self.axes:
            return shape
        counts = [math.prod(self.devices[dimension] for dimension in cut) for cut in self.axes]
        sizes = [size * count for size, count in zip(shape, counts, strict=True)]
        return (sizes[0] * self.optimizer, *sizes[1:])

    def replicated(self) -> Shape:
        """Return the dimensions along which devices have equal parts."""
        used = {dimension for cut in self.axes for dimension in cut}
        return tuple(dimension for dimension in range(len(self.devices)) if dimension not in used)

    def _index(self, place: list[int], dimensions: Shape) -> int:
        """Return the index of a device among those that differ in ``dimensions`` only, the first dimension the slowest."""
        index = 0
        for dimension in dimensions:
            index = index * self.devices[dimension] + place[dimension]
        return index


def read_strategy(path: Path) -> dict[str, Layout]:
    """Return the layout of every parameter in a strategy file. A merged file prefixes names with the stage: ``0-model...``.

    Raises:
        UserError: the file is not a strategy file.
    """
    try:
        return {item.text(1): _read_layout(item.message(2)) for item in Message(read_bytes(path)).messages(3)}
    except (IndexError, ValueError) as error:
        raise UserError(f"{path}: not a strategy file of MindSpore ({error})") from None


def _read_layout(message: Message) -> Layout:
    devices = tuple(message.message(1).integers(1))
    maps = [entry.integers(1) for entry in message.messages(2)]
    # One map of all axes, or a map for each axis where several dimensions may cut it.
    cuts = [[dimension] for dimension in maps[0]] if len(maps) == 1 else maps
    axes = tuple(tuple(len(devices) - 1 - dimension for dimension in cut if dimension >= 0) for cut in cuts)
    if any(not 0 <= dimension < len(devices) for cut in axes for dimension in cut) or math.prod(devices) < 1:
        raise ValueError(f"devices {devices} do not match axes {cuts}")
    layout = Layout(devices, axes)
    step, size = message.integer(6), message.integer(7)
    if not step or not size:
        return layout
    copies = math.prod(devices[dimension] for dimension in layout.replicated())
    return Layout(devices, axes, copies if size < 0 else size)


def rank_directories(directory: Path) -> dict[int, Path]:
    """Return the directories ``rank_N`` in ``directory`` by rank, in order."""
    matches = [(RANK.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def rank_files(directory: Path) -> dict[int, Path]:
    """Return one file of every rank, from the newest step that all ranks have.

    Raises:
        UserError: ranks are missing or have no common step.
    """
    files: dict[int, dict[tuple[int, int], Path]] = {}
    for rank, folder in rank_directories(directory).items():
        files[rank] = {}
        for path in sorted(folder.iterdir()):
            if path.suffix in SUFFIXES:
                match = STEP.search(path.stem)  # a file that names no step counts as step 0
                files[rank][(int(match[1]), int(match[2])) if match else (0, 0)] = path
    missing = sorted(set(range(max(files) + 1)) - set(files))
    if missing:
        raise UserError(
            f"{directory}: rank_{missing[0]} is missing, but rank_{max(files)} exists; copy the files of all ranks"
        )
    common = set.intersection(*(set(steps) for steps in files.values()))
    if not common:
        empty = next((rank for rank, steps in files.items() if not steps), None)
        why = "the ranks have no common step" if empty is None else f"rank_{empty} has no {' or '.join(SUFFIXES)}"
        raise UserError(f"{directory}: {why}; copy the files of all ranks")
    return {rank: steps[max(common)] for rank, steps in files.items()}


def strategy_files(directory: Path, ranks: int) -> dict[int, Path]:
    """Return the strategy file of every rank, or a merged file for all of them; empty if there are none near ``directory``."""
    for place in (directory / "strategy", directory.parent / "strategy"):
        by_rank = {rank: path for rank in range(ranks) for path in place.glob(f"*_rank_{rank}.ckpt")}
        if len(by_rank) == ranks:
            return by_rank
        merged = sorted(place.glob("*.ckpt"))
        if len(merged) == 1:
            return dict.fromkeys(range(ranks), merged[0])
    return {}


def join_rank_tensors(directory: Path) -> dict[str, Any]:
    """Return the whole tensors of all ranks. Without strategy files a tensor is the first rank's.

    Raises:
        UserError: files are missing or damaged, or the parts of a tensor do not make a whole.
    """
    files = rank_files(directory)
    strategies = strategy_files(directory, len(files))
    layouts = {path: read_strategy(path) for path in set(strategies.values())}
    parts: dict[str, dict[Shape, Any]] = {}  # by name and start
    shapes: dict[str, Shape] = {}
    for rank, path in files.items():
        for name, tensor in read_tensor_file(path).items():
            layout = _find_layout(layouts[strategies[rank]] if strategies else {}, name, rank)
            try:
                start, shape = layout.start(rank, tensor.shape), layout.full_shape(tensor.shape)
            except ValueError:
                raise UserError(
                    f"{path}: tensor {name} {list(tensor.shape)} does not match the strategy {strategies[rank]}"
                ) from None
            if shapes.setdefault(name, shape) != shape:
                raise UserError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, which differs from another rank"
                )
            parts.setdefault(name, {}).setdefault(start, tensor)
    tensors = {}
    for name, pieces in parts.items():
        first = next(iter(pieces.values()))
        try:
            complete = len(pieces) == 1 and first.shape == shapes[name]
            tensors[name] = first if complete else join_parts(name, shapes[name], list(pieces.items()))
        except ValueError as error:
            raise UserError(f"{directory}: {error}") from None
    return tensors


def _find_layout(layouts: Mapping[str, Layout], name: str, rank: int) -> Layout:
    """Return the layout of a tensor. A tensor that no strategy names is whole."""
    for key in layouts:
        # A merged file prefixes the stage, which follows from the rank and the devices of a stage.
        if key == name or key == f"{rank // math.prod(layouts[key].devices)}-{name}":
            return layouts[key]
    return Layout((), ())
