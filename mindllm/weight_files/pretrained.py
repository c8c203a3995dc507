"""The weights that a run starts from (``load_checkpoint``), and the adapter to continue with (``load_adapter``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindllm.config import ModelConfig, RunConfig, is_hugging_face
from mindllm.errors import UserError, nearest
from mindllm.train.checkpoint import load_checkpoint
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.manifest import MANIFEST
from mindllm.train.checkpoint.tensors import TensorSource, read_tensors
from mindllm.weight_files.adapters import (
    Adapter,
    checkpoint_adapter,
    frozen_base,
    initial_weights,
    merge_adapter,
)
from mindllm.weight_files.hugging_face import python_files
from mindllm.weight_files.opening import OpenedWeights, open_weights
from mindllm.weight_files.peft import is_bottleneck, is_peft, read_bottlenecks
from mindllm.weight_files.peft_reading import read_peft
from mindllm.weight_files.quantized import packed_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pretrained:
    """Weights of a model by mindllm's names, the path they are from, and an adapter trained next to them."""

    base: Mapping[str, TensorSource]
    path: str
    adapter: Adapter | None = None

    def model(self, base: ModelConfig) -> ModelConfig:
        """Return the model of :meth:`merged`: ``base``, changed by the adapter if that adds layers."""
        return base.base if self.adapter is None else self.adapter.model(base).merged

    def merged(self, base: ModelConfig) -> Mapping[str, TensorSource]:
        """Return all weights of :meth:`model`, with the adapter merged."""
        if self.adapter is None:
            return self.base
        return merge_adapter(self.adapter.model(base), self.base, self.adapter.weights)

    def run_weights(self, config: RunConfig) -> Mapping[str, TensorSource]:
        """Return the weights for the model of a run. Absent ones are initialized as in any run.

        Raises:
            UserError: the adapter is of another kind than the run trains.
        """
        model = config.model.config
        if model.pet_config is None or model.pet_config.tuner.of_all_weights:
            if self.model(model).architecture.layers != model.base.architecture.layers:
                raise self._adapter_mismatch(config)
            return packed_weights(model, self.merged(model))
        weights = packed_weights(model, initial_weights(model, self.base))
        if self.adapter is None:
            return weights
        adapted = self.adapter.model(model)
        same_shapes = model.architecture.weight_shapes() == adapted.architecture.weight_shapes()
        if not same_shapes or _scales(model) != _scales(adapted):
            raise self._adapter_mismatch(config)
        return {**weights, **self.adapter.weights}

    def _adapter_mismatch(self, config: RunConfig) -> UserError:
        assert self.adapter is not None
        keys = self.adapter.pet.model_dump(mode="json", exclude_unset=True)
        listed = ", ".join(f"{key} {value}" for key, value in keys.items())
        return config.error(
            "model.model_config.pet_config",
            f"is not that of {self.adapter.path}: {listed}; write the same, or merge the adapter first (mindllm weights merge)",
        )


def _scales(model: ModelConfig) -> set[float]:
    return {item.scale for layer in model.architecture.layers for item in layer.adapters}


def merged_pretrained(config: RunConfig) -> tuple[ModelConfig, Mapping[str, TensorSource]]:
    """Return the model and the weights of ``load_checkpoint`` for evaluation, with the adapter of the run merged.

    Raises:
        UserError: the weights are missing or damaged, or do not match the model.
    """
    pretrained, base = find_pretrained(config), config.model.config.base
    return pretrained.model(base), pretrained.merged(base)


def find_pretrained(config: RunConfig, base: Base | None = None) -> Pretrained:
    """Return the weights of ``load_checkpoint``, or of ``base`` if that is empty, and the adapter of ``load_adapter``.

    A checkpoint of adapters is loaded with its base. Everything is checked before a model is built.

    Raises:
        UserError: the weights are missing or damaged, or do not match the model.
    """
    path, model = config.load_checkpoint or (base.path if base else ""), config.model.config.base
    opened = _open(path, model)
    adapter = checkpoint_adapter(opened.checkpoint) if opened.checkpoint is not None else None
    if adapter is not None:
        path, opened = _open_base(config, adapter, model)
    if config.load_adapter:
        if adapter is not None:
            raise config.error("load_adapter", f"{config.load_checkpoint} is itself an adapter; pass its base there")
        adapter = read_adapter(chosen_adapter(config), model, opened.weights)
    if adapter is not None:
        adapter.model(model)
        adapter.require_base(opened.weights, path)
    return Pretrained(opened.weights, path, adapter)


def _open(path: str, model: ModelConfig) -> OpenedWeights:
    # Views of a memory map remain valid if the run deletes the checkpoint.
    opened = open_weights(path, model, option="--load_checkpoint", read=read_tensors)
    if is_hugging_face(path) and (files := python_files(Path(path))):
        logger.info("%s has Python code, which is not run: %s", path, ", ".join(files))
    return opened


def _open_base(config: RunConfig, adapter: Adapter, model: ModelConfig) -> tuple[str, OpenedWeights]:
    """Return the path and the weights of the base that a checkpoint of adapters names."""
    path = adapter.base.path if adapter.base else ""
    if not path:
        message = f"the base of {adapter.path} was drawn from a seed, so no file has it"
        raise config.error("load_checkpoint", message)
    if not Path(path).exists():
        raise config.error(
            "load_checkpoint",
            f"{path}, the base of the adapters in {adapter.path}, does not exist; write load_checkpoint: BASE and "
            f"load_adapter: {adapter.path}",
        )
    opened = _open(path, model)
    if opened.is_adapter:
        raise config.error(
            "load_checkpoint", f"{path}, the base of {adapter.path}, is itself an adapter; merge it first"
        )
    return path, opened


def chosen_adapter(config: RunConfig) -> Path:
    """Return the directory of the adapter that ``load_adapter`` and ``adapter_id`` name.

    Raises:
        UserError: the adapter does not exist, or several do and ``adapter_id`` is missing.
    """
    root = Path(config.load_adapter)
    path = root / config.adapter_id if config.adapter_id else root
    if is_adapter(path):
        return path
    if not root.is_dir():
        raise config.error("load_adapter", f"does not exist (value {root})")
    inside = sorted(item.name for item in root.iterdir() if item.is_dir() and is_adapter(item))
    if config.adapter_id:
        message = f"{root} has no such adapter (value {config.adapter_id}){nearest(config.adapter_id, inside)}"
        raise config.error("adapter_id", message)
    if inside:
        raise config.error("adapter_id", f"{root} has several adapters; write one of {', '.join(inside)}")
    message = f"is not an adapter: it has neither adapter_config.json nor a checkpoint (value {root})"
    raise config.error("load_adapter", message)


def is_adapter(path: Path) -> bool:
    """Return True if a directory is an adapter of PEFT, or a checkpoint, which may be one."""
    return is_peft(path) or (path / MANIFEST).is_file()


def read_adapter(path: Path, model: ModelConfig, base: Mapping[str, TensorSource] | None = None) -> Adapter:
    """Return the adapter in a directory of PEFT or a checkpoint, for a ``model`` without one.

    Arguments:
        base: the model's weights, which some adapters of PEFT require.

    Raises:
        UserError: the path is not an adapter, is damaged, or does not match the model.
    """
    if is_bottleneck(path):
        return read_bottlenecks(path)
    if is_peft(path):
        return read_peft(path, model, base)
    adapter = checkpoint_adapter(load_checkpoint(path, option="ADAPTER", with_optimizer=False))
    if adapter is None:
        raise UserError(f"{path}: has all weights of a model and is not an adapter; pass it as load_checkpoint")
    return adapter


def base_record(config: RunConfig, pretrained: Pretrained | None) -> Base | None:
    """Return the record of the frozen weights for the checkpoints of a run, or None if checkpoints have all weights."""
    if pretrained is None:
        return frozen_base(config, None, "")
    return frozen_base(config, pretrained.base, pretrained.path)
