"""Which projections of a layer the section ``pet_config`` names, by our names or those of the files of a family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mindllm.architecture.adapters import PARTS, AdapterSpec, BottleneckSpec
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import Shapes
from mindllm.architecture.tuners import ADALORA
from mindllm.config.tuning import ALL, PetConfig

Files = Mapping[str, tuple[str, ...]]
"""Our projections, below a layer, by the name that the files of the family give them: several where they are one matrix there."""


def bottlenecks_of(pet: PetConfig, hidden_size: int) -> tuple[BottleneckSpec, ...]:
    """The bottlenecks of every layer."""
    if not pet.tuner.own_format:
        return ()
    chosen = [part for part in PARTS if pet.target_modules == ALL or part in pet.target_modules]
    return tuple(BottleneckSpec(part, hidden_size, pet.adapter_length) for part in chosen)


def adapters_of(pet: PetConfig, layer: LayerSpec, files: Files) -> tuple[AdapterSpec, ...]:
    """The adapters of a layer."""
    if not pet.tuner.low_rank:
        return ()
    modules = layer.adaptable()
    return tuple(_adapters(pet, modules, [module for module in modules if targets(pet, module, files)], files))


def _adapters(pet: PetConfig, modules: Shapes, chosen: list[str], files: Files) -> Iterator[AdapterSpec]:
    for module in chosen:
        together = next((one for group in files.values() if module in group for one in group if one in chosen), module)
        out_features, in_features = modules[module]
        yield AdapterSpec(
            module,
            out_features,
            in_features,
            pet.rank,
            pet.scale,
            pet.use_dora,
            pet.lora_dropout,
            "" if together == module else together,
            pet.pet_type == ADALORA,
        )


def targets(pet: PetConfig, module: str, files: Files, layer: int = 0) -> bool:
    """Whether ``target_modules`` names a projection such as ``attention.wq``."""
    wanted = pet.target_modules
    if wanted == ALL:
        return True
    if isinstance(wanted, str):
        return any(re.fullmatch(wanted, f"model.layers.{layer}.{name}") for name in aliases(module, files))
    return any(names(name, module, files) for name in wanted)


def names(name: str, module: str, files: Files) -> bool:
    """Return whether ``name`` is that of a projection, or the end of it."""
    return any(alias == name or alias.endswith(f".{name}") for alias in aliases(module, files))


def aliases(module: str, files: Files) -> tuple[str, ...]:
    """What a projection is called here, and in the files of the family."""
    return (module, *(theirs for theirs, ours in files.items() if module in ours))
