"""What tuning adds to a model and what of it is trained, as values: adapters, bottlenecks, new layers, frozen weights."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from mindllm.architecture.parts import Shapes

TuningKind = Literal["lora", "adalora", "adapter", "llamapro", "galore", "lisa", "full"]
LORA, ADALORA, BOTTLENECK, LLAMAPRO = "lora", "adalora", "adapter", "llamapro"
GALORE, LISA, FULL_TUNING = "galore", "lisa", "full"
LOW_RANK = (LORA, ADALORA)  # kinds of tuning with adapters beside projections
OF_ALL_WEIGHTS = (GALORE, LISA, FULL_TUNING)  # kinds whose checkpoints are those of any model
A, B, MAGNITUDE, VALUES = "lora_a", "lora_b", "lora_magnitude", "lora_e"
ADAPTER_WEIGHTS = (A, B, MAGNITUDE, VALUES)
PARTS = ("attention", "feed_forward")
BEHIND = "_adapter"  # the cell that stands behind a part of a layer is called like it, with this
WEIGHT = ".weight"


@dataclass(frozen=True)
class Tuning:
    """What of a model is trained, and what its optimizer needs to know of that; the fields are keys of ``pet_config``.

    Adapters and frozen weights of layers are fields of the layers' own specifications.
    """

    pet_type: TuningKind
    modules_to_save: tuple[str, ...] = ()
    frozen_dtype: str = "float32"
    adalora_init_r: int = 12
    num_new_blocks: int = 4
    galore_rank: int = 128
    galore_update_proj_gap: int = 200
    freeze_include: tuple[str, ...] = ()
    freeze_exclude: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Origin:
    """Where a layer of a tuned model comes from: its number in the base; ``copied``: it is a new layer behind that one."""

    number: int
    copied: bool = False


def layer_origins(tuning: Tuning | None, layers: int) -> tuple[Origin, ...]:
    """The layers of a tuned model in order, of a base of so many ``layers``."""
    if tuning is None or tuning.pet_type != LLAMAPRO:
        return tuple(map(Origin, range(layers)))
    group = max(1, layers // tuning.num_new_blocks)
    found: list[Origin] = []
    for number in range(layers):
        found.append(Origin(number))
        if (number + 1) % group == 0:
            found.append(Origin(number, copied=True))
    return tuple(found)


def is_adapter_weight(name: str) -> bool:
    """Whether a weight of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_WEIGHTS or any(f".{part}{BEHIND}." in f".{name}" for part in PARTS)


def is_trained(tuning: Tuning | None, name: str) -> bool:
    """Whether training changes the weight of this name, which is one of the model that is tuned or of an adapter."""
    if tuning is None:
        return True
    if tuning.pet_type in LOW_RANK:
        return is_adapter_weight(name) or any(is_part(module, name) for module in tuning.modules_to_save)
    if tuning.pet_type in (BOTTLENECK, LLAMAPRO):
        return is_adapter_weight(name)
    if tuning.pet_type in (GALORE, LISA):
        return True
    if any(fnmatchcase(name, pattern) for pattern in tuning.freeze_include):
        return False
    return not tuning.freeze_exclude or any(fnmatchcase(name, pattern) for pattern in tuning.freeze_exclude)


def is_part(module: str, name: str) -> bool:
    """Return whether ``module`` is one level of a weight's name, or several."""
    return f".{module}." in f".{name}." and not is_adapter_weight(name)
