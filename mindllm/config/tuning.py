"""Section ``model.model_config.pet_config``: what of a model is trained, and with which adapters. MindFormers' keys, made strict.

LoRA: Hu et al., 2021; rsLoRA: Kalajdzievski, 2023; LoRA+: Hayou et al., 2024; DoRA: Liu et al., 2024; AdaLoRA: Zhang et al.,
2023; bottlenecks: Houlsby et al., 2019; LLaMA Pro: Wu et al., 2024; GaLore: Zhao et al., 2024; LISA: Pan et al., 2024; NEFTune:
Jain et al., 2023.
What follows from the section for each layer are fields of its specification: layers that are tuned differently are of
different kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from mindllm.config.section import DType, List, PositiveInt, Section
from mindllm.errors import nearest

if TYPE_CHECKING:
    from mindllm.config.layers import LayerSpec, Shapes

ALL = "ALL"
A, B, MAGNITUDE, VALUES = "lora_a", "lora_b", "lora_magnitude", "lora_e"
ADAPTER_WEIGHTS = (A, B, MAGNITUDE, VALUES)
LOW_RANK = ("lora", "adalora")  # kinds of tuning with adapters beside projections
OF_ALL_WEIGHTS = ("galore", "lisa", "full")  # kinds whose checkpoints are those of any model
PARTS = ("attention", "feed_forward")
BEHIND = "_adapter"  # the cell that stands behind a part of a layer is called like it, with this
Files = Mapping[str, tuple[str, ...]]
"""Our projections, below a layer, by the name that the files of the family give them: several where they are one matrix there."""
WEIGHT = ".weight"


LORA, ADALORA, BOTTLENECK, LLAMAPRO = "lora", "adalora", "adapter", "llamapro"
GALORE, LISA, FULL_TUNING = "galore", "lisa", "full"
KEYS_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "lora_rank",
            "use_rslora",
            "use_dora",
            "lora_plus_lr_ratio",
        ),
        (LORA,),
    ),
    **dict.fromkeys(("lora_alpha", "lora_dropout", "modules_to_save"), LOW_RANK),
    "target_modules": (*LOW_RANK, BOTTLENECK),
    "frozen_dtype": (*LOW_RANK, BOTTLENECK, LLAMAPRO),
    **dict.fromkeys(
        (
            "adalora_init_r",
            "adalora_target_r",
            "adalora_tinit",
            "adalora_tfinal",
            "adalora_delta_t",
            "adalora_beta1",
            "adalora_beta2",
            "adalora_orth_reg_weight",
        ),
        (ADALORA,),
    ),
    "adapter_length": (BOTTLENECK,),
    "num_new_blocks": (LLAMAPRO,),
    **dict.fromkeys(("galore_rank", "galore_update_proj_gap", "galore_scale"), (GALORE,)),
    **dict.fromkeys(("lisa_activated_layers", "lisa_step_interval"), (LISA,)),
    "freeze_include": (FULL_TUNING,),
    "freeze_exclude": (FULL_TUNING,),
}
"""The kinds of tuning that each key is about; the others are about all of them."""


RANK_EPSILON = 1e-5  # PEFT's AdaLoRA adds it to the rank it divides by


class PetConfig(Section):
    """Section ``model.model_config.pet_config``: parameter-efficient tuning."""

    pet_type: Literal["lora", "adalora", "adapter", "llamapro", "galore", "lisa", "full"] = Field(
        default="lora",
        description="lora: low-rank adapters are trained, the model is frozen but for `modules_to_save`; adalora: so are "
        "adapters whose ranks go to where they matter; adapter: bottlenecks behind attention and feed-forward; llamapro: new "
        "layers between frozen ones; galore: all, with projected moments; lisa: a few layers at a time; full: the model is "
        "trained but for what is frozen by pattern.",
    )
    lora_rank: PositiveInt = Field(default=8, description="Rank of the adapters.")
    lora_alpha: float = Field(default=16.0, gt=0, description="Adapters are scaled by `lora_alpha / lora_rank`.")
    use_rslora: bool = Field(
        default=False, description="Adapters are scaled by `lora_alpha / sqrt(lora_rank)` instead."
    )
    use_dora: bool = Field(
        default=False, description="DoRA: the length of every row of an adapted weight is trained by itself."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Part of an adapter's input that is dropped.")
    target_modules: str | List[str] = Field(
        default=ALL,
        description="Projections with adapters: ALL, a list of names (ours or those of the family's files), or a regular "
        "expression over whole paths, such as `.*wq|.*wv`. `pet_type: adapter`: ALL, or of `attention`, `feed_forward`.",
    )
    modules_to_save: List[str] = Field(
        default=(), description="Parts trained whole beside the adapters, by name: norm_out, tok_embeddings, lm_head, …"
    )
    frozen_dtype: DType = Field(
        default="float32",
        description="Type that matrices which are not trained are held in; what is computed with them is not changed by it, but "
        "for their rounding. Embeddings of a CPU, norms and biases stay float32, and codes stay codes.",
    )
    lora_plus_lr_ratio: float | None = Field(
        default=None, gt=0, description="LoRA+: learning rate of the second matrices relative to that of the first."
    )
    adalora_init_r: PositiveInt = Field(
        default=12, description="`pet_type: adalora`: rank that every adapter begins with."
    )
    adalora_target_r: PositiveInt = Field(default=8, description="In it: rank that is left at the end, on average.")
    adalora_tinit: int = Field(default=0, ge=0, description="In it: steps before the first ranks are removed.")
    adalora_tfinal: int = Field(default=0, ge=0, description="In it: steps at the end of the run with the last choice.")
    adalora_delta_t: PositiveInt = Field(default=1, description="In it: steps from one choice of ranks to the next.")
    adalora_beta1: float = Field(default=0.85, gt=0, lt=1, description="In it: decay of the mean of importance.")
    adalora_beta2: float = Field(default=0.85, gt=0, lt=1, description="In it: decay of the mean of its changes.")
    adalora_orth_reg_weight: float = Field(
        default=0.5,
        ge=0,
        description="In it: weight of the penalty that keeps ranks orthogonal; its gradient alone is computed.",
    )
    adapter_length: PositiveInt = Field(default=128, description="`pet_type: adapter`: width of the bottlenecks.")
    num_new_blocks: PositiveInt = Field(
        default=4,
        description="`pet_type: llamapro`: so many layers are copied behind themselves, the last of every group of equally many; "
        "a copy begins by adding nothing.",
    )
    galore_rank: PositiveInt = Field(
        default=128, description="`pet_type: galore`: rank of the gradients that the moments of matrices see."
    )
    galore_update_proj_gap: PositiveInt = Field(
        default=200, description="In it: steps from one choice of the projections to the next."
    )
    galore_scale: float = Field(default=1.0, gt=0, description="In it: factor on what is projected back.")
    lisa_activated_layers: PositiveInt = Field(
        default=2,
        description="`pet_type: lisa`: layers that are trained at a time, beside embeddings, final norm and head.",
    )
    lisa_step_interval: PositiveInt = Field(default=20, description="In it: steps from one draw of layers to the next.")
    freeze_include: List[str] = Field(
        default=(),
        description="`pet_type: full`: weights that are not trained, by shell patterns (`*tok_embeddings*`).",
    )
    freeze_exclude: List[str] = Field(
        default=(), description="`pet_type: full`: all but the weights of these patterns are not trained."
    )
    neftune_noise_alpha: float | None = Field(
        default=None, gt=0, description="NEFTune: strength of the noise on embeddings while training; null: none."
    )

    @field_validator("target_modules")
    @classmethod
    def _is_expression(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise PydanticCustomError(
                    "expression", "is no regular expression: {why}", {"why": str(error)}
                ) from None
        return value

    def rate_factor(self, name: str, dimensions: int) -> float:
        """The learning rate of a weight relative to that of the run: LoRA+ lets second matrices, and vectors, learn faster."""
        faster = name.endswith(f".{B}") or dimensions == 1
        return self.lora_plus_lr_ratio if self.lora_plus_lr_ratio and faster else 1.0

    @property
    def rank(self) -> int:
        """Of adapters beside projections, as they are built."""
        return self.adalora_init_r if self.pet_type == ADALORA else self.lora_rank

    @property
    def scale(self) -> float:
        """The factor on what adapters add."""
        if self.pet_type == ADALORA:
            return self.lora_alpha / (self.adalora_init_r + RANK_EPSILON)
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)


@dataclass(frozen=True)
class AdapterSpec:
    """``scale · B(A x)`` beside one projection of a layer: A ``[rank, in]``, B ``[out, rank]``; with ``dora`` lengths ``[out]``.

    ``first_matrix_of``: the projection whose A this one multiplies by, where the files of the family have both as one matrix:
    there it is one adapter. ``has_values``: between A and B stands a diagonal matrix E ``[rank]``.
    """

    module: str
    out_features: int
    in_features: int
    rank: int
    scale: float
    dora: bool = False
    dropout: float = 0.0
    first_matrix_of: str = ""
    has_values: bool = False

    def weights(self) -> Shapes:
        """Names below the layer, and shapes."""
        shapes: Shapes = {} if self.first_matrix_of else {f"{self.module}.{A}": (self.rank, self.in_features)}
        if self.has_values and not self.first_matrix_of:
            shapes[f"{self.module}.{VALUES}"] = (self.rank,)
        shapes[f"{self.module}.{B}"] = (self.out_features, self.rank)
        return {**shapes, **({f"{self.module}.{MAGNITUDE}": (self.out_features,)} if self.dora else {})}


@dataclass(frozen=True)
class BottleneckSpec:
    """Behind a part of a layer, ``attention`` or ``feed_forward``: down ``[length, hidden]``, up ``[hidden, length]``, biases."""

    module: str
    hidden_size: int
    length: int

    @property
    def name(self) -> str:
        """Its cell, below the layer."""
        return f"{self.module}{BEHIND}"

    def weights(self) -> Shapes:
        """Names below the layer, and shapes."""
        return {
            f"{self.name}.down.weight": (self.length, self.hidden_size),
            f"{self.name}.down.bias": (self.length,),
            f"{self.name}.up.weight": (self.hidden_size, self.length),
            f"{self.name}.up.bias": (self.hidden_size,),
        }


def bottlenecks_of(pet: PetConfig, hidden_size: int) -> tuple[BottleneckSpec, ...]:
    """The bottlenecks of every layer."""
    if pet.pet_type != BOTTLENECK:
        return ()
    chosen = [part for part in PARTS if pet.target_modules == ALL or part in pet.target_modules]
    return tuple(BottleneckSpec(part, hidden_size, pet.adapter_length) for part in chosen)


@dataclass(frozen=True)
class Origin:
    """Where a layer of a tuned model comes from: its number in the base; ``copied``: it is a new layer behind that one."""

    number: int
    copied: bool = False


def layer_origins(pet: PetConfig | None, layers: int) -> tuple[Origin, ...]:
    """The layers of a tuned model in order, of a base of so many ``layers``."""
    if pet is None or pet.pet_type != LLAMAPRO:
        return tuple(map(Origin, range(layers)))
    group = max(1, layers // pet.num_new_blocks)
    found: list[Origin] = []
    for number in range(layers):
        found.append(Origin(number))
        if (number + 1) % group == 0:
            found.append(Origin(number, copied=True))
    return tuple(found)


def is_adapter_weight(name: str) -> bool:
    """Whether a weight of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_WEIGHTS or any(f".{part}{BEHIND}." in f".{name}" for part in PARTS)


def adaptable(layer: LayerSpec) -> Shapes:
    """Projections of a layer that can have an adapter, by name, and the shape of their weight ``[out, in]``.

    Experts and their router have none: they are no projections of all tokens.
    """
    return {
        f"{part}.{name.removesuffix(WEIGHT)}": shape
        for part, matrices in (
            ("attention", layer.attention.matrices()),
            ("feed_forward", layer.feed_forward.matrices()),
        )
        for name, shape in matrices.items()
        if len(shape) == 2 and not name.startswith(("router.", "experts.", "shared_gate."))
    }


def adapters_of(pet: PetConfig, layer: LayerSpec, files: Files) -> tuple[AdapterSpec, ...]:
    """The adapters of a layer."""
    if pet.pet_type not in LOW_RANK:
        return ()
    modules = adaptable(layer)
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
    return any(_names(name, module, files) for name in wanted)


def _names(name: str, module: str, files: Files) -> bool:
    return any(alias == name or alias.endswith(f".{name}") for alias in aliases(module, files))


def aliases(module: str, files: Files) -> tuple[str, ...]:
    """What a projection is called here, and in the files of the family."""
    return (module, *(theirs for theirs, ours in files.items() if module in ours))


def is_trained(pet: PetConfig | None, name: str) -> bool:
    """Whether training changes the weight of this name, which is one of the model that is tuned or of an adapter."""
    if pet is None:
        return True
    if pet.pet_type in LOW_RANK:
        return is_adapter_weight(name) or any(_saves(module, name) for module in pet.modules_to_save)
    if pet.pet_type in (BOTTLENECK, LLAMAPRO):
        return is_adapter_weight(name)
    if pet.pet_type in (GALORE, LISA):
        return True
    if any(fnmatchcase(name, pattern) for pattern in pet.freeze_include):
        return False
    return not pet.freeze_exclude or any(fnmatchcase(name, pattern) for pattern in pet.freeze_exclude)


def _saves(module: str, name: str) -> bool:
    """Whether ``module`` is one level of a weight's name, or several."""
    return f".{module}." in f".{name}." and not is_adapter_weight(name)


def mistakes(
    pet: PetConfig, layers: tuple[LayerSpec, ...], files: Files, names: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Keys of the section that cannot be meant, each with why. ``names``: all weights of the model."""
    names = list(names)
    yield from _keys_of_others(pet)
    if pet.pet_type == LLAMAPRO and len(layers) % pet.num_new_blocks:
        possible = ", ".join(str(count) for count in range(1, len(layers) + 1) if len(layers) % count == 0)
        message = f"must divide the {len(layers)} layers (value {pet.num_new_blocks}); write one of {possible}"
        yield "num_new_blocks", message
    if pet.pet_type == ADALORA and pet.adalora_target_r > pet.adalora_init_r:
        message = f"is above the rank at the start, {pet.adalora_init_r} (value {pet.adalora_target_r})"
        yield "adalora_target_r", f"{message}; write at most that"
    if pet.pet_type == GALORE:
        widths = {module: min(shape) for layer in layers for module, shape in adaptable(layer).items()}
        narrowest = min(widths, key=lambda module: widths[module])
        if pet.galore_rank > (width := widths[narrowest]):
            message = f"is above the width of {narrowest}, {width} (value {pet.galore_rank}); write at most {width}"
            yield "galore_rank", message
    if pet.pet_type == LISA and pet.lisa_activated_layers > len(layers):
        message = (
            f"is above the {len(layers)} layers of the model (value {pet.lisa_activated_layers}); write at most that"
        )
        yield "lisa_activated_layers", message
    if pet.pet_type == BOTTLENECK:
        yield from _wrong_bottlenecks(pet, layers[0].attention.hidden_size)
    if pet.pet_type in LOW_RANK:
        yield from _wrong_targets(pet, layers, files)
        for module in pet.modules_to_save:
            if not any(_saves(module, name) for name in names):
                levels = {level for name in names for level in name.split(".")[:-1] if not level.isdigit()}
                yield "modules_to_save", f"{module} is no part of the model{nearest(module, levels)}"
    for key in ("freeze_include", "freeze_exclude"):
        patterns = getattr(pet, key)
        if patterns and pet.pet_type != FULL_TUNING:
            yield (
                key,
                f"adapters freeze the whole model (pet_type {pet.pet_type}); write pet_type: full, or modules_to_save",
            )
            continue
        if pet.pet_type != FULL_TUNING:
            continue
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield key, f"pattern '{pattern}' matches no weight; weights are called {names[0]} or {names[1]}"
    if pet.pet_type == FULL_TUNING and not any(is_trained(pet, name) for name in names):
        yield "freeze_include", "nothing is left to train"


def _keys_of_others(pet: PetConfig) -> Iterator[tuple[str, str]]:
    """Keys that say something, and would change nothing."""
    fields = type(pet).model_fields
    for key, kinds in KEYS_OF.items():
        if pet.pet_type not in kinds and getattr(pet, key) != fields[key].default and not key.startswith("freeze_"):
            yield key, f"is a key of pet_type {' and '.join(kinds)} (pet_type here: {pet.pet_type}); leave it out"


def _wrong_bottlenecks(pet: PetConfig, width: int) -> Iterator[tuple[str, str]]:
    wanted, key = pet.target_modules, "target_modules"
    if isinstance(wanted, str) and wanted != ALL:
        yield (
            key,
            f"bottlenecks stand behind whole parts of a layer (value {wanted}); write ALL, or a list of {', '.join(PARTS)}",
        )
    elif wanted != ALL and (not wanted or {*wanted} - {*PARTS}):
        wrong = next((name for name in wanted if name not in PARTS), "")
        yield (
            key,
            f"bottlenecks stand behind {' and '.join(PARTS)}, not behind {wrong or 'nothing'}{nearest(wrong, PARTS)}",
        )
    if pet.adapter_length > width:
        yield (
            "adapter_length",
            f"is above the width of the model, {width} (value {pet.adapter_length}); write at most {width}",
        )


def _wrong_targets(pet: PetConfig, layers: tuple[LayerSpec, ...], files: Files) -> Iterator[tuple[str, str]]:
    key, wanted = "target_modules", pet.target_modules
    modules = {module: shape for layer in layers for module, shape in adaptable(layer).items()}
    known = [*modules, *files]
    if not isinstance(wanted, str):
        for name in wanted:
            if not any(_names(name, module, files) for module in modules):
                yield key, f"{name} is no projection of the model{nearest(name, [one.split('.')[-1] for one in known])}"
                return
    matched: dict[str, set[bool]] = {}
    for number, layer in enumerate(layers):
        for module in adaptable(layer):
            matched.setdefault(module, set()).add(targets(pet, module, files, number))
    if not any(True in found for found in matched.values()):
        yield key, f"matches no projection (value {wanted}); projections: {', '.join(modules)}"
    for module, found in matched.items():
        if len(found) > 1:
            yield key, f"must name {module} in all layers or in none (value {wanted})"
            return
    widths = {module: min(shape) for module, shape in modules.items() if True in matched[module]}
    narrowest = min(widths, key=lambda module: widths[module], default="")
    if narrowest and pet.rank > widths[narrowest]:
        width, key = widths[narrowest], "adalora_init_r" if pet.pet_type == ADALORA else "lora_rank"
        yield key, f"is above the width of {narrowest}, {width} (value {pet.rank}); write at most {width}"
