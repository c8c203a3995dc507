"""Adapters: weights trained next to a frozen model, merged into it and removed again, one tensor at a time in fp32.

LoRA: ``W + s B A``; AdaLoRA: ``W + s B diag(E) A``. DoRA: the rows of LoRA's result, each with its trained length (Liu et al.,
2024, equation 5).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindllm.architecture.adapters import MAGNITUDE, VALUES, WEIGHT, A, AdapterSpec, B
from mindllm.architecture.tuners import layer_origins
from mindllm.config import ModelConfig, RunConfig
from mindllm.config.checks.tuning import mistakes
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError
from mindllm.train.checkpoint.loading import Base, Checkpoint, shape_differences
from mindllm.train.checkpoint.tensors import LazyTensor, TensorSource, read_slices

if TYPE_CHECKING:
    from mindllm.train.state import RunState

Weights = Mapping[str, TensorSource]
LAYER = re.compile(r"model\.layers\.(\d+)\.")
FINGERPRINT_DIGITS = 12  # in messages
FP32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Adapter:
    """Trained weights by mindllm's names, the section ``pet`` that describes them, and the base if the files name it."""

    path: Path
    pet: PetConfig
    weights: Weights
    base: Base | None = None

    def model(self, base: ModelConfig) -> ModelConfig:
        """Return the model with this adapter.

        Raises:
            UserError: the adapter does not match the model.
        """
        plain = base.base
        for key, message in mistakes(
            self.pet, plain.architecture.layers, plain.projections_in_files, plain.architecture.weight_shapes()
        ):
            raise UserError(f"{self.path}: {key}: {message}")
        model = plain.model_copy(update={"pet_config": self.pet})
        if lines := shape_differences(self.weights, model.architecture.trained_shapes()):
            raise UserError(f"{self.path}: adapter does not match this model: {lines[0]}")
        return model

    def require_base(self, base: Weights, name: str) -> None:
        """Raise UserError if the adapter was trained with another base. An adapter that names no base fits any."""
        if self.base is None or not self.base.fingerprint:
            return
        digest = fingerprint(base)
        if digest != self.base.fingerprint:
            trained = self.base.path or "weights drawn from a seed"
            expected, actual = (value[:FINGERPRINT_DIGITS] for value in (self.base.fingerprint, digest))
            raise UserError(
                f"{self.path}: was trained with another base than {name or 'the weights of this run'} (fingerprint {expected} of "
                f"{trained}, found {actual}); pass its own base"
            )


def checkpoint_adapter(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter in a checkpoint of a tuned model, or None if the checkpoint has all weights."""
    checkpoint.refuse_simulated()
    base = Base.from_state(checkpoint.state)
    pet = checkpoint.model.pet_config if base is not None else None
    return None if pet is None else Adapter(checkpoint.path, pet, checkpoint.weights, base)


def fingerprint(base: Weights) -> str:
    """Return the SHA-256 of the first row, in fp32, of each weight outside layers and of each weight of the first layer.

    It is independent of the files' format and does not require the other values.
    """
    digest = hashlib.sha256()
    for name in sorted(base):
        if name.startswith("model.layers.") and not name.startswith("model.layers.0."):
            continue
        source = base[name]
        first = (slice(0, 1), *(slice(0, size) for size in tuple(source.shape)[1:]))
        row = np.ascontiguousarray(read_slices(source, first), np.float32)
        digest.update(f"{name}{tuple(source.shape)}".encode() + row.tobytes())
    return digest.hexdigest()


def frozen_base(config: RunConfig, base: Weights | None, path: str) -> Base | None:
    """Return the record of the frozen weights for the checkpoints of a run, or None if checkpoints have all weights.

    Arguments:
        base: the frozen weights, read from ``path``; None if they were drawn from the seed.
    """
    if not has_frozen_weights(config.model.config):
        return None
    if base is None:
        return Base("", "")
    names = config.model.config.base.architecture.weight_shapes()
    return Base(str(Path(path).resolve()), fingerprint({name: base[name] for name in names}))


def has_frozen_weights(model: ModelConfig) -> bool:
    """Return True if some weights are frozen, so that checkpoints leave them out."""
    architecture = model.architecture
    return len(architecture.trained_shapes()) < len(architecture.weight_shapes())


def full_weights(state: RunState, trained: Weights, key: str) -> Weights:
    """Return all weights of ``model.merged``: ``trained`` ones, merged into the frozen ones of the run.

    Raises:
        UserError: about ``key``: the frozen weights were drawn from the seed, so no file has them.
    """
    if state.base is None:
        return trained
    if state.base_weights is None:
        message = "requires all weights, but the frozen ones were drawn from the seed; set load_checkpoint"
        raise state.config.error(key, message)
    return merge_adapter(state.config.model.config, state.base_weights, trained)


def merge_adapter(model: ModelConfig, base: Weights, trained: Weights) -> dict[str, TensorSource]:
    """Return all weights of ``model.merged``, which computes the same as ``model`` with its base and adapter."""
    adapters, origins = _adapters(model), _base_names(model)
    weights: dict[str, TensorSource] = {}
    for name in model.merged.architecture.weight_shapes():
        if name in adapters:
            weights[name] = _add_update(name, adapters[name], base, trained)
        else:
            weights[name] = trained[name] if name in trained else base[origins[name]]
    return weights


def unmerge_adapter(model: ModelConfig, merged: Weights, trained: Weights) -> dict[str, TensorSource]:
    """Return the base of ``merged`` weights.

    Raises:
        UserError: merging replaced row lengths or whole modules, so the base cannot be computed.
    """
    require_reversible(model.pet_config)
    adapters = _adapters(model)
    return {
        name: _add_update(name, adapters[name], merged, trained, sign=-1.0) if name in adapters else merged[name]
        for name in model.base.architecture.weight_shapes()
    }


def require_reversible(pet: PetConfig | None) -> None:
    """Raise UserError if merged weights do not determine their base."""
    if pet is not None and (pet.use_dora or pet.modules_to_save or not pet.tuner.low_rank):
        reason = "use_dora replaces row lengths" if pet.use_dora else "whole modules were replaced"
        raise UserError(
            f"this adapter cannot be removed from merged weights: {pet.tuner.not_merged or reason}; keep the base"
        )


def initial_weights(model: ModelConfig, base: Weights) -> dict[str, TensorSource]:
    """Return the weights of the tuned ``model`` that follow from its ``base``.

    These are the base's weights, DoRA's initial row lengths, and copies of layers that initially add nothing (LLaMA Pro: Wu et
    al., 2024, section 3.2).
    """
    origins = _base_names(model)
    weights: dict[str, TensorSource] = {name: base[origin] for name, origin in origins.items() if origin in base}
    for number, origin in enumerate(layer_origins(model.architecture.pet, model.num_layers)):
        if origin.copied:
            names = [f"model.layers.{number}.{name}" for name in model.architecture.layers[number].last_of_branches()]
            weights |= {name: np.zeros(tuple(base[origins[name]].shape), np.float32) for name in names}
    for name, (prefix, adapter) in _adapters(model).items():
        if adapter.dora:

            def make(source: TensorSource = base[name]) -> np.ndarray:
                return row_lengths(np.asarray(source, np.float32))

            weights[f"{prefix}.{MAGNITUDE}"] = LazyTensor((adapter.out_features,), FP32, make)
    return weights


def _base_names(model: ModelConfig) -> dict[str, str]:
    """Return for each weight of ``model.merged`` the weight of the base that it is, or starts as a copy of."""
    numbers = [origin.number for origin in layer_origins(model.architecture.pet, model.num_layers)]
    names = {}
    for name in model.merged.architecture.weight_shapes():
        match = LAYER.match(name)
        names[name] = f"model.layers.{numbers[int(match[1])]}.{name[match.end() :]}" if match else name
    return names


def _adapters(model: ModelConfig) -> dict[str, tuple[str, AdapterSpec]]:
    """Return the adapters and paths of their projections, by the weight they adapt."""
    return {
        f"model.layers.{number}.{adapter.module}{WEIGHT}": (f"model.layers.{number}.{adapter.module}", adapter)
        for number, layer in enumerate(model.architecture.layers)
        for adapter in layer.adapters
    }


def _add_update(
    name: str, located: tuple[str, AdapterSpec], base: Weights, trained: Weights, sign: float = 1.0
) -> TensorSource:
    """Return the weight ``name`` with the update of its adapter added, or subtracted with a negative ``sign``."""
    path, adapter = located
    shared = f"{path.removesuffix(adapter.module)}{adapter.first_matrix_of or adapter.module}"
    first, second = trained[f"{shared}.{A}"], trained[f"{path}.{B}"]
    values = trained[f"{shared}.{VALUES}"] if adapter.has_values else None

    def make() -> np.ndarray:
        columns = np.asarray(second, np.float32)
        if values is not None:
            columns = columns * np.asarray(values, np.float32)
        update = columns @ np.asarray(first, np.float32)
        weight = np.asarray(base[name], np.float32) + np.float32(sign * adapter.scale) * update
        if not adapter.dora:
            return weight
        lengths = np.asarray(trained[f"{path}.{MAGNITUDE}"], np.float32)
        return weight * (lengths / row_lengths(weight))[:, None]

    return LazyTensor((adapter.out_features, adapter.in_features), FP32, make)


def row_lengths(weight: np.ndarray) -> np.ndarray:
    """Return the lengths of the rows of ``weight``."""
    from mindllm.models import weights  # imports MindSpore, which nothing else here needs

    return weights.row_lengths(weight)
