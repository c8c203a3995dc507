"""What optimizers of tuned models keep beside moments: names and shapes, known without building anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindllm.config.tuning import ADALORA, VALUES, A, B

if TYPE_CHECKING:
    from mindllm.config.architecture import Architecture
    from mindllm.config.layers import Shapes

IMPORTANCE, UNCERTAINTY, KEPT_RANKS, STEPS_TAKEN = "importance", "uncertainty", "kept_ranks", "steps_taken"
PREFIXES = tuple(f"{kind}." for kind in (IMPORTANCE, UNCERTAINTY, KEPT_RANKS))


@dataclass(frozen=True)
class Triplets:
    """One adapter of AdaLoRA by the names of its weights: A, E, and B, in parts where projections of ours share the others."""

    first: str
    values: str
    seconds: tuple[str, ...]


def triplets(architecture: Architecture) -> tuple[Triplets, ...]:
    """All adapters of a model whose ranks are allocated."""
    return tuple(_triplets(architecture))


def _triplets(architecture: Architecture) -> Iterator[Triplets]:
    for number, layer in enumerate(architecture.layers):
        together: dict[str, list[str]] = {}
        for adapter in layer.adapters:
            together.setdefault(adapter.first_matrix_of or adapter.module, []).append(adapter.module)
        for first, modules in together.items():
            path = f"model.layers.{number}"
            yield Triplets(
                f"{path}.{first}.{A}", f"{path}.{first}.{VALUES}", tuple(f"{path}.{one}.{B}" for one in modules)
            )


def further_state(architecture: Architecture) -> Shapes:
    """Shapes by name, all fp32, of what is kept beside the state that every run has."""
    pet = architecture.pet
    if pet is None or pet.pet_type != ADALORA:
        return {}
    groups, shapes = triplets(architecture), architecture.trained_shapes()
    names = [name for group in groups for name in (group.first, group.values, *group.seconds)]
    means = {f"{kind}.{name}": shapes[name] for kind in (IMPORTANCE, UNCERTAINTY) for name in names}
    kept = {f"{KEPT_RANKS}.{group.values}": shapes[group.values] for group in groups}
    return {**means, **kept, STEPS_TAKEN: ()}


def is_further_state(name: str) -> bool:
    """Whether a parameter is such state."""
    return name == STEPS_TAKEN or name.startswith(PREFIXES)
