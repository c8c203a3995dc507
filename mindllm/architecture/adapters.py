"""Weights that tuning adds to a model, as values: low-rank adapters on projections, and bottlenecks after parts of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.architecture.parts import SPLIT_INPUT, Shapes

A, B, MAGNITUDE, VALUES = "lora_a", "lora_b", "lora_magnitude", "lora_e"
ADAPTER_WEIGHTS = (A, B, MAGNITUDE, VALUES)
PARTS = ("attention", "feed_forward")
BEHIND = "_adapter"  # suffix of the cell that follows a part of a layer
WEIGHT = ".weight"


@dataclass(frozen=True)
class AdapterSpec:
    """``scale · B(A x)`` added to a projection: A ``[rank, in]``, B ``[out, rank]``; with ``dora`` also magnitudes ``[out]``.

    ``first_matrix_of`` is the projection whose A this adapter shares, because the family's files have both as one matrix with one
    adapter. ``has_values``: a diagonal matrix E ``[rank]`` between A and B.
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

    def rank_input(self, ranks: int) -> float:
        """Return the input size on one of ``ranks`` tensor-parallel ranks."""
        return self.in_features / (ranks if self.splits_input else 1)

    @property
    def splits_input(self) -> bool:
        """Return True if tensor parallelism splits the input of the projection, not its output."""
        return self.module.rpartition(".")[2] in SPLIT_INPUT

    def weights(self) -> Shapes:
        """Return names relative to the layer, and shapes."""
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
        """Return the name of its cell, relative to the layer."""
        return f"{self.module}{BEHIND}"

    def weights(self) -> Shapes:
        """Return names relative to the layer, and shapes."""
        return {
            f"{self.name}.down.weight": (self.length, self.hidden_size),
            f"{self.name}.down.bias": (self.length,),
            f"{self.name}.up.weight": (self.hidden_size, self.length),
            f"{self.name}.up.bias": (self.hidden_size,),
        }


def is_adapter_weight(name: str) -> bool:
    """Return True if a weight of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_WEIGHTS or any(f".{part}{BEHIND}." in f".{name}" for part in PARTS)


def is_part(module: str, name: str) -> bool:
    """Return whether ``module`` is one level of a weight's name, or several."""
    return f".{module}." in f".{name}." and not is_adapter_weight(name)
