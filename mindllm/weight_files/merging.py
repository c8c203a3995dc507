"""What was trained put into the weights it stands beside, and taken out again: lazily, a tensor at a time, in fp32.

LoRA: ``W + s B A``; AdaLoRA: ``W + s B diag(E) A``. DoRA: the rows of the first, each with its trained length (Liu et al., 2024,
equation 5).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from mindllm.architecture.adapters import MAGNITUDE, VALUES, WEIGHT, A, AdapterSpec, B
from mindllm.architecture.tuners import layer_origins
from mindllm.config import ModelConfig
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError
from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.weight_files.family_weights import Lazy

Weights = Mapping[str, TensorSource]
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def merged(model: ModelConfig, base: Weights, trained: Weights) -> dict[str, TensorSource]:
    """All weights of ``model.merged``, which computes with them what ``model`` computes with its base and what was trained."""
    adapters, origins = _adapters(model), _names_in_base(model)
    return {
        name: _with_adapter(name, adapters[name], base, trained)
        if name in adapters
        else trained[name]
        if name in trained
        else base[origins[name]]
        for name in model.merged.architecture.weight_shapes()
    }


def unmerged(model: ModelConfig, whole: Weights, trained: Weights) -> dict[str, TensorSource]:
    """The weights that ``whole`` was merged from.

    Raises:
        UserError: they cannot be known: lengths of rows or whole modules were replaced.
    """
    require_reversible(model.pet_config)
    adapters = _adapters(model)
    return {
        name: _with_adapter(name, adapters[name], whole, trained, sign=-1.0) if name in adapters else whole[name]
        for name in model.base.architecture.weight_shapes()
    }


def require_reversible(pet: PetConfig | None) -> None:
    """Raises UserError where merged weights do not say what they were merged from."""
    if pet is not None and (pet.use_dora or pet.modules_to_save or not pet.tuner.low_rank):
        why = "use_dora replaces lengths of rows" if pet.use_dora else "whole modules were replaced"
        raise UserError(
            f"this adapter cannot be taken out of merged weights: {pet.tuner.not_merged or why}; keep the base"
        )


def adapted(model: ModelConfig, base: Weights) -> dict[str, TensorSource]:
    """The weights of the tuned ``model`` that follow from its ``base``: these; the lengths of rows that DoRA begins with; copies
    of layers that begin by adding nothing (LLaMA Pro: Wu et al., 2024, section 3.2).
    """
    origins = _names_in_base(model)
    found: dict[str, TensorSource] = {name: base[theirs] for name, theirs in origins.items() if theirs in base}
    for number, origin in enumerate(layer_origins(model.architecture.pet, model.num_layers)):
        if origin.copied:
            names = [f"model.layers.{number}.{name}" for name in model.architecture.layers[number].last_of_branches()]
            found |= {name: np.zeros(tuple(base[origins[name]].shape), np.float32) for name in names}
    for name, (prefix, adapter) in _adapters(model).items():
        if adapter.dora:
            found[f"{prefix}.{MAGNITUDE}"] = Lazy(
                (adapter.out_features,),
                np.dtype(np.float32),
                lambda source=base[name]: row_lengths(np.asarray(source, np.float32)),  # type: ignore[misc]
            )
    return found


def _names_in_base(model: ModelConfig) -> dict[str, str]:
    """The weights of ``model.merged`` by the name of the one that they are, or begin as a copy of, in the base."""
    numbers = [origin.number for origin in layer_origins(model.architecture.pet, model.num_layers)]
    return {name: _in_layer(name, numbers) for name in model.merged.architecture.weight_shapes()}


def _in_layer(name: str, numbers: list[int]) -> str:
    found = LAYER.match(name)
    return name if found is None else f"model.layers.{numbers[int(found[1])]}.{name[found.end() :]}"


def _adapters(model: ModelConfig) -> dict[str, tuple[str, AdapterSpec]]:
    """The adapters by the weight they stand beside, with the path of the projection."""
    return {
        f"model.layers.{number}.{adapter.module}{WEIGHT}": (f"model.layers.{number}.{adapter.module}", adapter)
        for number, layer in enumerate(model.architecture.layers)
        for adapter in layer.adapters
    }


def _with_adapter(
    name: str, found: tuple[str, AdapterSpec], base: Weights, trained: Weights, sign: float = 1.0
) -> TensorSource:
    path, adapter = found
    shared = adapter.first_matrix_of or adapter.module
    first = trained[f"{path.removesuffix(adapter.module)}{shared}.{A}"]
    second = trained[f"{path}.{B}"]
    values = trained[f"{path.removesuffix(adapter.module)}{shared}.{VALUES}"] if adapter.has_values else None

    def make() -> np.ndarray:
        columns = np.asarray(second, np.float32)
        update = (columns if values is None else columns * np.asarray(values, np.float32)) @ np.asarray(
            first, np.float32
        )
        weight = np.asarray(base[name], np.float32) + np.float32(sign * adapter.scale) * update
        if not adapter.dora:
            return weight
        wanted = np.asarray(trained[f"{path}.{MAGNITUDE}"], np.float32)
        return weight * (wanted / row_lengths(weight))[:, None]

    return Lazy((adapter.out_features, adapter.in_features), np.dtype(np.float32), make)


def row_lengths(weight: np.ndarray) -> np.ndarray:
    """Return the lengths of the rows of ``weight``."""
    from mindllm.models import weights  # imports MindSpore, which nothing else here needs

    return weights.row_lengths(weight)
