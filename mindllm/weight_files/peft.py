"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``. Written here; ``peft_reading`` reads
them.

A projection has its name in the family's files. If they have several projections as one matrix, it has one adapter: the
projections share its first matrix, and the rows of its second one are theirs together.

Bottleneck adapters have no PEFT format. Their two files have the keys of the section ``pet_config`` with
``peft_type: BOTTLENECK``, and fp32 tensors by mindllm's names (``model.layers.0.feed_forward_adapter.down.weight``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mindllm.architecture.adapters import MAGNITUDE, VALUES, WEIGHT, A, B
from mindllm.architecture.tuners import ADALORA, BOTTLENECK, TUNERS
from mindllm.config import ModelConfig
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError
from mindllm.families.hugging_face import read_json
from mindllm.families.weight_table import EMBEDDING, HEAD
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.names import atomic_directory, refuse_existing
from mindllm.train.checkpoint.tensors import TensorSource, read_metadata, write_tensors
from mindllm.weight_files.adapters import Adapter
from mindllm.weight_files.family_weights import FamilyWeights
from mindllm.weight_files.hugging_face import FRAMEWORK, read_tensor_file, write_file, write_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA_NAMES = ("lora_A.weight", "lora_B.weight")
ADALORA_NAMES = ("lora_A", "lora_B")  # in PEFT these are parameters, not modules
ADALORA_VALUES, DORA_MAGNITUDE = "lora_E", "lora_magnitude_vector"
ADALORA_KEYS = {
    "adalora_init_r": "init_r",
    "adalora_target_r": "target_r",
    "adalora_tinit": "tinit",
    "adalora_tfinal": "tfinal",
    "adalora_delta_t": "deltaT",
    "adalora_beta1": "beta1",
    "adalora_beta2": "beta2",
    "adalora_orth_reg_weight": "orth_reg_weight",
}
PEFT_ADALORA, PEFT_BOTTLENECK = "ADALORA", "BOTTLENECK"  # values of peft_type
BOTTLENECK_KEYS = TUNERS[BOTTLENECK].keys
FINGERPRINT = "base_fingerprint"  # in the header of the tensors, ignored by PEFT


def is_peft(path: Path) -> bool:
    """Return True if a directory has an adapter of PEFT."""
    return (path / CONFIG_FILE).is_file()


def is_bottleneck(path: Path) -> bool:
    """Return True if a directory has bottleneck adapters."""
    return is_peft(path) and read_json(path / CONFIG_FILE).get("peft_type") == PEFT_BOTTLENECK


def read_bottlenecks(directory: Path) -> Adapter:
    """Return the bottleneck adapters in ``directory``, reading only the header of their weights.

    Raises:
        UserError: files are missing or damaged, or a value is invalid.
    """
    content, path = read_json(directory / CONFIG_FILE), directory / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"{directory}: {WEIGHTS_FILE} is missing")
    section = {"pet_type": BOTTLENECK, **{key: content[key] for key in BOTTLENECK_KEYS if key in content}}
    try:
        pet = PetConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{directory / CONFIG_FILE}: {key}: invalid value ({first['msg']})") from None
    return Adapter(directory, pet, read_tensor_file(path), recorded_base(content, read_metadata(path)))


def recorded_base(content: Mapping[str, Any], metadata: Mapping[str, str]) -> Base:
    """Return the base that the two files of an adapter name."""
    return Base(str(content.get("base_model_name_or_path") or ""), metadata.get(FINGERPRINT, ""))


def write_bottlenecks(
    directory: Path, model: ModelConfig, weights: Mapping[str, TensorSource], base: Base | None
) -> Path:
    """Write the trained bottleneck adapters of ``model`` as ``directory``. Raises like :func:`write_peft`."""
    refuse_existing(directory)
    assert model.pet_config is not None
    content = {"peft_type": PEFT_BOTTLENECK, **model.pet_config.model_dump(mode="json", include=set(BOTTLENECK_KEYS))}
    tensors = {name: weights[name] for name in model.architecture.trained_shapes()}
    return _write_files(directory, content, tensors, base)


def write_peft(directory: Path, model: ModelConfig, weights: Mapping[str, TensorSource], base: Base | None) -> Path:
    """Write the weights that ``model`` trains next to its base as ``directory``, which is complete or absent.

    Raises:
        UserError: the directory exists and is not empty, or PEFT has no format for this tuning.
        RunFailed: the directory cannot be written.
    """
    refuse_existing(directory)
    family = FamilyWeights(model)
    tensors = dict(_peft_tensors(family, model, weights))
    head, embedding = (PREFIX + family.table.theirs(name) for name in (HEAD, EMBEDDING))
    tied = model.tie_word_embeddings and embedding in tensors
    if tied:
        tensors[head] = tensors[embedding]  # PEFT gives the head its own copy
    return _write_files(directory, _peft_config(model, family, list(tensors), tied), tensors, base)


def _write_files(
    directory: Path, content: Mapping[str, Any], tensors: Mapping[str, TensorSource], base: Base | None
) -> Path:
    metadata = {FINGERPRINT: base.fingerprint} if base and base.fingerprint else {}
    content = {**content, "base_model_name_or_path": base.path if base and base.path else None}
    with atomic_directory(directory) as temporary:
        write = partial(write_tensors, tensors=tensors, framework=FRAMEWORK, metadata=metadata)
        write_file(temporary / WEIGHTS_FILE, write)
        write_json(temporary / CONFIG_FILE, content)
    return directory


def _peft_tensors(
    family: FamilyWeights, model: ModelConfig, weights: Mapping[str, TensorSource]
) -> Iterator[tuple[str, TensorSource]]:
    """Yield whole trained weights and the matrices of adapters by PEFT's names."""
    for weight in family.weights.values():
        if all(name in weights for name in weight.ours):
            yield PREFIX + weight.theirs, family.write_tensor(weight, weights)
        if not weight.theirs.endswith(WEIGHT):
            continue
        projections = [name.removesuffix(WEIGHT) for name in weight.ours]
        adapted = [name for name in projections if f"{name}.{B}" in weights]
        if not adapted:
            continue
        module = PREFIX + weight.theirs.removesuffix(WEIGHT)
        names = LORA_NAMES
        if f"{adapted[0]}.{VALUES}" in weights:
            names = ADALORA_NAMES
            values = np.asarray(weights[f"{adapted[0]}.{VALUES}"], np.float32).reshape(-1, 1)
            yield f"{module}.{ADALORA_VALUES}", values
        first = np.asarray(weights[f"{adapted[0]}.{A}"], np.float32)
        yield f"{module}.{names[0]}", first
        # Projections of the matrix that are not adapted get rows of zeros.
        rows = [
            np.asarray(weights[f"{name}.{B}"], np.float32)
            if name in adapted
            else np.zeros((family.ours[f"{name}{WEIGHT}"][0], len(first)), np.float32)
            for name in projections
        ]
        yield f"{module}.{names[1]}", np.ascontiguousarray(family.join(weight, rows))
        magnitudes = [weights[f"{name}.{MAGNITUDE}"] for name in projections if f"{name}.{MAGNITUDE}" in weights]
        if magnitudes:
            if len(adapted) < len(projections):
                raise UserError(
                    f"{weight.theirs} is one matrix in the files of this family, and use_dora adapted a part of it, which PEFT "
                    f"does not support; target all of {', '.join(name.rpartition('.')[2] for name in projections)}"
                )
            lengths = [np.asarray(magnitude, np.float32) for magnitude in magnitudes]
            yield f"{module}.{DORA_MAGNITUDE}", np.ascontiguousarray(family.join(weight, lengths))


def _peft_config(model: ModelConfig, family: FamilyWeights, names: list[str], tied: bool) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` for tensors of these names."""
    pet = model.pet_config
    if pet is None or not pet.tuner.low_rank:
        raise UserError(
            "PEFT's format requires an adapter; these weights are of a model that was trained without (pet_type)"
        )
    names = [name.removeprefix(PREFIX) for name in names]
    modules = [name.partition(".lora_A")[0] for name in names if ".lora_A" in name]
    saved = [name.rpartition(".")[0] for name in names if "lora_" not in name]
    transposed = any(
        weight.transposed for name, weight in family.weights.items() if name.removesuffix(WEIGHT) in modules
    )
    method: dict[str, Any] = {
        "peft_type": "LORA",
        "r": pet.rank,
        "use_rslora": pet.use_rslora,
        "use_dora": pet.use_dora,
    }
    if pet.pet_type == ADALORA:
        method = {"peft_type": PEFT_ADALORA, "total_step": 1 << 30, "rank_pattern": None}
        method |= {peft_key: getattr(pet, key) for key, peft_key in ADALORA_KEYS.items()}
    return {
        **method,
        **({"ensure_weight_tying": True} if tied else {}),
        "task_type": "CAUSAL_LM",
        "lora_alpha": pet.lora_alpha,
        "lora_dropout": pet.lora_dropout,
        "target_modules": _module_endings(modules),
        "modules_to_save": _module_endings(saved) or None,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def _module_endings(modules: list[str]) -> list[str]:
    """Return the paths of modules after the number of the layer, by which PEFT finds them."""
    endings = set()
    for module in modules:
        levels = module.split(".")
        number = next((place for place, level in enumerate(levels) if level.isdigit()), -1)
        endings.add(".".join(levels[number + 1 :]))
    return sorted(endings)
