"""The weights a run starts from: a checkpoint of ours, a Hugging Face directory, or MindFormers'; and an adapter beside them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindllm.config import ModelConfig, RunConfig, is_hugging_face
from mindllm.errors import UserError, nearest
from mindllm.train.checkpoint.loading import Base, Checkpoint, floating_dtype, load_checkpoint
from mindllm.train.checkpoint.manifest import MANIFEST
from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.weight_files.adapter import Adapter, adapter_of_checkpoint, trained_beside
from mindllm.weight_files.bottlenecks import is_bottlenecks, read_bottlenecks
from mindllm.weight_files.files import code_of
from mindllm.weight_files.hugging_face import read_weights
from mindllm.weight_files.merging import adapted, merged
from mindllm.weight_files.mindformers import is_mindformers, read_mindformers
from mindllm.weight_files.peft import is_peft
from mindllm.weight_files.peft_reading import read_peft
from mindllm.weight_files.quantized.held import packed_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pretrained:
    """Weights of a model by our names, none of them read yet, where they come from, and what was trained beside them."""

    base: Mapping[str, TensorSource]
    path: str
    adapter: Adapter | None = None

    def model(self, base: ModelConfig) -> ModelConfig:
        """What :meth:`whole` has the weights of: ``base``, or what merging the adapter makes of it."""
        return base.base if self.adapter is None else self.adapter.model(base).merged

    def whole(self, base: ModelConfig) -> Mapping[str, TensorSource]:
        """All weights of :meth:`model`; the adapter is merged into them."""
        if self.adapter is None:
            return self.base
        return merged(self.adapter.model(base), self.base, self.adapter.weights)

    def of(self, config: RunConfig) -> Mapping[str, TensorSource]:
        """The weights that the model of a run is given; those that are absent begin as in any run.

        Raises:
            UserError: the adapter is of another kind than those the run trains.
        """
        model = config.model.config
        if model.pet_config is None or model.pet_config.tuner.of_all_weights:
            if self.model(model).architecture.layers != model.base.architecture.layers:
                raise self._other_kind(config)
            return packed_weights(model, self.whole(model))
        weights = packed_weights(model, adapted(model, self.base))
        if self.adapter is None:
            return weights
        theirs = self.adapter.model(model)
        if model.architecture.weight_shapes() != theirs.architecture.weight_shapes() or _scales(model) != _scales(
            theirs
        ):
            raise self._other_kind(config)
        return {**weights, **self.adapter.weights}

    def _other_kind(self, config: RunConfig) -> UserError:
        assert self.adapter is not None
        return config.error(
            "model.model_config.pet_config",
            f"is not that of {self.adapter.path}: {_described(self.adapter)}; write the same, or merge the adapter first "
            "(mindllm weights merge)",
        )


def _scales(model: ModelConfig) -> set[float]:
    return {item.scale for layer in model.architecture.layers for item in layer.adapters}


def _described(adapter: Adapter) -> str:
    pet = adapter.pet
    changed = pet.model_dump(mode="json", exclude_unset=True)
    return ", ".join(f"{key} {value}" for key, value in changed.items())


def merged_pretrained(config: RunConfig) -> tuple[ModelConfig, Mapping[str, TensorSource]]:
    """The weights of ``load_checkpoint``, with the adapter of the run in them, and the model they are of: for what evaluates.

    Raises:
        UserError: there are none, they are damaged, or do not fit.
    """
    found, base = find_pretrained(config), config.model.config.base
    return found.model(base), found.whole(base)


def find_pretrained(config: RunConfig, base: Base | None = None) -> Pretrained:
    """The weights of ``load_checkpoint``, or of ``base`` where that is empty, and the adapter of ``load_adapter``.

    A checkpoint that holds adapters alone brings its base along. All is checked before there is a model.

    Raises:
        UserError: there are none, they are damaged, or do not fit.
    """
    path, model = config.load_checkpoint or (base.path if base else ""), config.model.config.base
    adapter = None
    checkpoint = _checkpoint(path)
    if checkpoint is not None:
        adapter = adapter_of_checkpoint(checkpoint)
    if adapter is None:
        weights = _whole(path, model, checkpoint)
    else:
        path, weights = _base_of(config, adapter, model)
    if config.load_adapter:
        if adapter is not None:
            raise config.error("load_adapter", f"{config.load_checkpoint} is an adapter itself; give its base there")
        adapter = read_adapter(chosen_adapter(config), model, weights)
    if adapter is not None:
        adapter.model(model)
        adapter.require_base(weights, path)
    return Pretrained(weights, path, adapter)


def _checkpoint(path: str) -> Checkpoint | None:
    if is_hugging_face(path) or is_mindformers(path):
        return None
    checkpoint = load_checkpoint(path, option="--load_checkpoint", with_optimizer=False)
    checkpoint.refuse_simulated()
    return checkpoint


def _whole(path: str, model: ModelConfig, checkpoint: Checkpoint | None) -> Mapping[str, TensorSource]:
    if checkpoint is not None:
        shapes, held = model.architecture.weight_shapes(), checkpoint.weights
        checkpoint.require({name: (shape, floating_dtype(held, name)) for name, shape in shapes.items()})
        return checkpoint.weights
    if is_hugging_face(path):
        if code := code_of(Path(path)):
            logger.info("%s holds Python code, which is not run: %s", path, ", ".join(code))
        return read_weights(path, model)
    return read_mindformers(path, model)


def _base_of(config: RunConfig, adapter: Adapter, model: ModelConfig) -> tuple[str, Mapping[str, TensorSource]]:
    """The base that a checkpoint of adapters names, and its weights."""
    path = adapter.base.path if adapter.base else ""
    if not path:
        message = f"{adapter.path} holds what was trained beside weights drawn from a seed, which no file has"
        raise config.error("load_checkpoint", message)
    if not Path(path).exists():
        raise config.error(
            "load_checkpoint",
            f"{adapter.path} holds adapters, and their base {path} is not there any more; write load_checkpoint: BASE and "
            f"load_adapter: {adapter.path}",
        )
    beneath = _checkpoint(path)
    if beneath is not None and adapter_of_checkpoint(beneath) is not None:
        raise config.error(
            "load_checkpoint", f"{path}, the base of {adapter.path}, holds adapters itself; merge it first"
        )
    return path, _whole(path, model, beneath)


def chosen_adapter(config: RunConfig) -> Path:
    """The directory of the adapter that ``load_adapter`` and ``adapter_id`` name.

    Raises:
        UserError: it is not there, or is one of several that must be named.
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
        raise config.error("adapter_id", f"{root} holds several adapters; write one of {', '.join(inside)}")
    message = f"is no adapter: neither adapter_config.json nor a checkpoint is there (value {root})"
    raise config.error("load_adapter", message)


def is_adapter(path: Path) -> bool:
    """Whether a directory is an adapter of PEFT, or a checkpoint, which may hold one."""
    return is_peft(path) or (path / MANIFEST).is_file()


def read_adapter(path: Path, model: ModelConfig, base: Mapping[str, TensorSource] | None = None) -> Adapter:
    """Return the adapter of a directory of PEFT or of a checkpoint, for a ``model`` without one.

    ``base``: its weights, which some adapters of PEFT are read with.

    Raises:
        UserError: it is not an adapter, is damaged, or does not match the model.
    """
    if is_bottlenecks(path):
        return read_bottlenecks(path)
    if is_peft(path):
        return read_peft(path, model, base)
    adapter = adapter_of_checkpoint(load_checkpoint(path, option="ADAPTER", with_optimizer=False))
    if adapter is None:
        raise UserError(f"{path}: holds all weights of a model and no adapter; give it as load_checkpoint")
    return adapter


def base_record(config: RunConfig, pretrained: Pretrained | None) -> Base | None:
    """What the checkpoints of a run say of the weights they leave out."""
    if pretrained is None:
        return trained_beside(config, None, "")
    return trained_beside(config, pretrained.base, pretrained.path)
