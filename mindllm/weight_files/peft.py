"""Write adapters in the format of Hugging Face's PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

A projection is named as in the family's files. Where they hold several of ours as one matrix there is one adapter for it: its
first matrix is the one ours share, the rows of its second one are those of ours together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.architecture.adapters import MAGNITUDE, VALUES, WEIGHT, A, B
from mindllm.architecture.tuners import ADALORA
from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.families.weight_table import EMBEDDING, HEAD
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.names import refuse_existing, whole_directory
from mindllm.train.checkpoint.tensors import TensorSource, write_tensors
from mindllm.weight_files.family_weights import FamilyWeights
from mindllm.weight_files.hugging_face_export import FRAMEWORK, write_file, write_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
THEIR_A, THEIR_B, THEIR_MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
NAMES_OF_ADALORA = ("lora_A", "lora_B", "lora_E")
"""Tensors of AdaLoRA, which are no modules in PEFT."""
KEYS_OF_ADALORA = {
    "adalora_init_r": "init_r",
    "adalora_target_r": "target_r",
    "adalora_tinit": "tinit",
    "adalora_tfinal": "tfinal",
    "adalora_delta_t": "deltaT",
    "adalora_beta1": "beta1",
    "adalora_beta2": "beta2",
    "adalora_orth_reg_weight": "orth_reg_weight",
}
THEIR_ADALORA = "ADALORA"
FINGERPRINT = "base_fingerprint"  # a text in the header of our files, which PEFT passes over


def is_peft(path: Path) -> bool:
    """Whether a directory holds an adapter of PEFT."""
    return (path / CONFIG_FILE).is_file()


def write_peft(directory: Path, model: ModelConfig, weights: Mapping[str, TensorSource], base: Base | None) -> Path:
    """Writes what ``model`` trains beside its base as ``directory``, whole or not at all.

    Raises:
        UserError: the directory is there and not empty, or the tuning has no form in PEFT.
        RunFailed: it cannot be written.
    """
    refuse_existing(directory)
    family = FamilyWeights(model)
    tensors = dict(_theirs(family, model, weights))
    embedding = PREFIX + family.table.theirs(EMBEDDING)
    if model.tie_word_embeddings and embedding in tensors:
        tensors[PREFIX + family.table.theirs(HEAD)] = tensors[embedding]  # PEFT gives the head a copy of its own
    return write_adapter_files(directory, _content(model, family, tensors, base), tensors, base)


def write_adapter_files(
    directory: Path, content: Mapping[str, Any], tensors: Mapping[str, TensorSource], base: Base | None
) -> Path:
    """The two files of an adapter as ``directory``, whole or not at all; the fingerprint of the base is in the header."""
    metadata = {FINGERPRINT: base.fingerprint} if base and base.fingerprint else {}
    with whole_directory(directory) as temporary:
        write = partial(write_tensors, tensors=tensors, framework=FRAMEWORK, metadata=metadata)
        write_file(temporary / WEIGHTS_FILE, write)
        write_json(temporary / CONFIG_FILE, dict(content))
    return directory


def _theirs(
    family: FamilyWeights, model: ModelConfig, weights: Mapping[str, TensorSource]
) -> Iterator[tuple[str, TensorSource]]:
    for weight in family.weights.values():
        whole = [ours for ours in weight.ours if ours in weights]
        if len(whole) == len(weight.ours):
            yield PREFIX + weight.theirs, family.write_one(weight, weights)
        if not weight.theirs.endswith(WEIGHT):
            continue
        ours = [name.removesuffix(WEIGHT) for name in weight.ours]
        adapted = [name for name in ours if f"{name}.{B}" in weights]
        if not adapted:
            continue
        module = PREFIX + weight.theirs.removesuffix(WEIGHT)
        first, second = THEIR_A, THEIR_B
        if f"{adapted[0]}.{VALUES}" in weights:
            first, second, third = NAMES_OF_ADALORA
            yield f"{module}.{third}", np.asarray(weights[f"{adapted[0]}.{VALUES}"], np.float32).reshape(-1, 1)
        yield f"{module}.{first}", np.asarray(weights[f"{adapted[0]}.{A}"], np.float32)
        rank = weights[f"{adapted[0]}.{A}"].shape[0]
        rows = [
            np.asarray(weights[f"{name}.{B}"], np.float32)
            if name in adapted
            else np.zeros((family.ours[f"{name}{WEIGHT}"][0], rank), np.float32)
            for name in ours
        ]
        yield f"{module}.{second}", np.ascontiguousarray(family.together(weight, rows))
        lengths = [weights.get(f"{name}.{MAGNITUDE}") for name in ours]
        if any(one is not None for one in lengths):
            if len(adapted) < len(ours):
                raise UserError(
                    f"{weight.theirs} is one matrix in the files of this family, and use_dora adapted a part of it: PEFT has "
                    f"no such adapter; target all of {', '.join(name.rpartition('.')[2] for name in ours)}"
                )
            parts = [np.asarray(one, np.float32) for one in lengths]
            yield f"{module}.{THEIR_MAGNITUDE}", np.ascontiguousarray(family.together(weight, parts))


def _content(
    model: ModelConfig, family: FamilyWeights, tensors: Mapping[str, TensorSource], base: Base | None
) -> dict[str, Any]:
    pet = model.pet_config
    if pet is None or not pet.tuner.low_rank:
        raise UserError(
            "PEFT's format holds adapters; these weights are of a model that was trained without (pet_type)"
        )
    names = [name.removeprefix(PREFIX) for name in tensors]
    modules = [name.partition(".lora_A")[0] for name in names if ".lora_A" in name]
    saved = [name.rpartition(".")[0] for name in names if "lora_" not in name]
    transposed = any(
        weight.transposed for name, weight in family.weights.items() if name.removesuffix(WEIGHT) in modules
    )
    own: dict[str, Any] = {"peft_type": "LORA", "r": pet.rank, "use_rslora": pet.use_rslora, "use_dora": pet.use_dora}
    if pet.pet_type == ADALORA:
        own = {"peft_type": THEIR_ADALORA, "total_step": 1 << 30, "rank_pattern": None}
        own |= {theirs: getattr(pet, ours) for ours, theirs in KEYS_OF_ADALORA.items()}
    tied = model.tie_word_embeddings and PREFIX + family.table.theirs(HEAD) in tensors
    return {
        **own,
        **({"ensure_weight_tying": True} if tied else {}),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path if base and base.path else None,
        "lora_alpha": pet.lora_alpha,
        "lora_dropout": pet.lora_dropout,
        "target_modules": _below_layers(modules),
        "modules_to_save": _below_layers(saved) or None,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def _below_layers(modules: list[str]) -> list[str]:
    """Modules as PEFT looks for them: by the end of their path, from behind the number of the layer on."""
    found = set()
    for module in modules:
        levels = module.split(".")
        number = next((place for place, level in enumerate(levels) if level.isdigit()), -1)
        found.add(".".join(levels[number + 1 :]))
    return sorted(found)
