"""Adapters in the format of Hugging Face's PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

A projection is named as in the family's files. Where they hold several of ours as one matrix there is one adapter for it: its
first matrix is the one ours share, the rows of its second one are those of ours together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.architecture.adapters import MAGNITUDE, VALUES, WEIGHT, A, B, is_adapter_weight
from mindllm.architecture.tuners import ADALORA
from mindllm.config import ModelConfig
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError, shortened
from mindllm.families.hugging_face import read_json
from mindllm.families.weight_table import Weight
from mindllm.train.checkpoint.adapters.adapter import Adapter, Base
from mindllm.train.checkpoint.family_weights import FamilyWeights
from mindllm.train.checkpoint.formats.files import tensors_of_file
from mindllm.train.checkpoint.hugging_face_export import FRAMEWORK, write_file, write_json
from mindllm.train.checkpoint.names import refuse_existing, whole_directory
from mindllm.train.checkpoint.tensors import TensorSource, read_metadata, write_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
THEIR_A, THEIR_B, THEIR_MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
THEIR_VALUES = "lora_E"
NAMES_OF_ADALORA = {"lora_A": THEIR_A, "lora_B": THEIR_B, "lora_E": THEIR_VALUES}
"""AdaLoRA's tensors, which are no modules in PEFT, and what they are called here while they are read."""
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
KINDS = ("LORA", THEIR_ADALORA)
FINGERPRINT = "base_fingerprint"  # a text in the header of our files, which PEFT passes over
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {  # keys that must not say anything else, where they are there
    "bias": ("none",),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "use_qalora": (False,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


def is_peft(path: Path) -> bool:
    """Whether a directory holds an adapter of PEFT."""
    return (path / CONFIG_FILE).is_file()


def read_peft(directory: Path, model: ModelConfig) -> Adapter:
    """The adapter in ``directory`` for a ``model`` without one; nothing of the weights is read but their header.

    Raises:
        UserError: files are missing or damaged, the kind of adapter is not supported, or tensors are of another model.
    """
    content = read_json(directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"{directory}: has no {WEIGHTS_FILE}; adapters in pickled files are not read")
    _refuse_unsupported(directory / CONFIG_FILE, content)
    found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors_of_file(path).items()}
    if content["peft_type"] == THEIR_ADALORA:
        found = _with_all_ranks(content, found)
    family = FamilyWeights(model)
    weights = dict(_ours(family, found))
    if found:
        raise UserError(f"{path}: is an adapter of another model: it has {next(iter(found))}, which this one has not")
    pet = _pet_config(directory / CONFIG_FILE, content, weights)
    base = Base(str(content.get("base_model_name_or_path") or ""), read_metadata(path).get(FINGERPRINT, ""))
    return Adapter(directory, pet, weights, base)


def _refuse_unsupported(path: Path, content: Mapping[str, Any]) -> None:
    if content.get("peft_type") not in KINDS:
        kind = shortened(content.get("peft_type"))
        read = f"{', '.join(KINDS)}, and BOTTLENECK of our own"
        raise UserError(f"{path}: peft_type: this kind of adapter is not read (value {kind}); read are {read}")
    for key, allowed in UNSUPPORTED.items():
        if key == "rank_pattern" and content["peft_type"] == THEIR_ADALORA:
            continue
        if key in content and content[key] not in allowed:
            raise UserError(
                f"{path}: {key}: this is not supported (value {shortened(content[key])}); without: {allowed[0]}"
            )


def _ours(family: FamilyWeights, found: dict[str, TensorSource]) -> Iterator[tuple[str, TensorSource]]:
    """Our weights out of ``found``, from which they are taken."""
    for weight in family.weights.values():
        if weight.theirs in found:
            pair = family.read_one(weight, found.pop(weight.theirs))
            yield from pair.items()
        module = weight.theirs.removesuffix(WEIGHT)
        first, second = found.pop(f"{module}.{THEIR_A}", None), found.pop(f"{module}.{THEIR_B}", None)
        lengths, values = found.pop(f"{module}.{THEIR_MAGNITUDE}", None), found.pop(f"{module}.{THEIR_VALUES}", None)
        if first is None or second is None or not weight.theirs.endswith(WEIGHT):
            continue
        ours = [name.removesuffix(WEIGHT) for name in weight.ours]
        yield f"{ours[0]}.{A}", np.asarray(first, np.float32)
        if values is not None:
            yield f"{ours[0]}.{VALUES}", np.asarray(values, np.float32).reshape(-1)
        for kind, source in ((B, second), (MAGNITUDE, lengths)):
            if source is not None:
                parts = _apart(family, weight, np.asarray(source, np.float32))
                yield from ((f"{name}.{kind}", part) for name, part in zip(ours, parts, strict=True))


def _with_all_ranks(content: Mapping[str, Any], found: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of AdaLoRA as those of LoRA are called, with the ranks that were removed and left out, as zeros."""
    pattern = {
        name.removeprefix(PREFIX).rpartition(".")[0]: kept for name, kept in (content.get("rank_pattern") or {}).items()
    }
    return dict(_of_all_ranks(pattern, found))


def _of_all_ranks(
    pattern: Mapping[str, list[bool]], found: Mapping[str, TensorSource]
) -> Iterator[tuple[str, TensorSource]]:
    for name, tensor in found.items():
        module, _, kind = name.rpartition(".")
        if kind not in NAMES_OF_ADALORA:
            yield name, tensor
            continue
        values = np.asarray(tensor, np.float32)
        by_rank = values.T if kind == "lora_B" else values
        kept = np.array(pattern.get(module, [True] * len(by_rank)), bool)
        if kept.sum() == len(by_rank) < len(kept):
            by_rank, few = np.zeros((len(kept), *by_rank.shape[1:]), np.float32), by_rank
            by_rank[kept] = few
        yield f"{module}.{NAMES_OF_ADALORA[kind]}", np.ascontiguousarray(by_rank.T if kind == "lora_B" else by_rank)


def _apart(family: FamilyWeights, weight: Weight, values: np.ndarray) -> list[np.ndarray]:
    rows = sum(family.ours[ours][0] for ours in weight.ours)
    if values.shape[0] != rows:
        raise UserError(
            f"an adapter of another model: {weight.theirs} has {rows} rows, its adapter {values.shape[0]}; give its own base"
        )
    return family.apart(weight, values)


def _pet_config(path: Path, content: Mapping[str, Any], weights: Mapping[str, TensorSource]) -> PetConfig:
    modules = {".".join(name.split(".")[3:-1]): None for name in weights if name.endswith(f".{B}")}
    saved = {name.rpartition(".")[0].split(".")[-1]: None for name in weights if not is_adapter_weight(name)}
    try:
        if content["peft_type"] == THEIR_ADALORA:
            keys = {ours: content[theirs] for ours, theirs in KEYS_OF_ADALORA.items()}
            return PetConfig(
                pet_type="adalora",
                lora_alpha=float(content["lora_alpha"]),
                lora_dropout=float(content.get("lora_dropout") or 0.0),
                target_modules=tuple(modules),
                modules_to_save=tuple(saved),
                **keys,
            )
        return PetConfig(
            lora_rank=content["r"],
            lora_alpha=float(content["lora_alpha"]),
            lora_dropout=float(content.get("lora_dropout") or 0.0),
            use_rslora=bool(content.get("use_rslora")),
            use_dora=bool(content.get("use_dora")),
            target_modules=tuple(modules),
            modules_to_save=tuple(saved),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not understood: {shortened(str(error))}") from None


def write_peft(directory: Path, model: ModelConfig, weights: Mapping[str, TensorSource], base: Base | None) -> Path:
    """Writes what ``model`` trains beside its base as ``directory``, whole or not at all.

    Raises:
        UserError: the directory is there and not empty, or the tuning has no form in PEFT.
        RunFailed: it cannot be written.
    """
    refuse_existing(directory)
    family = FamilyWeights(model)
    tensors = dict(_theirs(family, model, weights))
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
    return {
        **own,
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
