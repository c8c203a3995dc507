"""What optimizers keep: names and shapes, known without building anything. Those of tuned models keep more than moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from mindllm.architecture.adapters import VALUES, A, B
from mindllm.architecture.decoder import Architecture
from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.parts import SPLIT_INPUT, Shapes
from mindllm.architecture.tuners import ADALORA, GALORE, LISA, Tuning

MOMENTS = ("adam_m", "adam_v")
MOMENT_PREFIXES = tuple(f"{moment}." for moment in MOMENTS)
"""What stands before the name of a weight in those of its moments."""
ADAMW = "AdamW"
MUON, MUON_MOMENT = "Muon", "muon_m"
"""The optimizer of this name keeps one moment of every matrix of layers, experts' too, and AdamW's two of other weights."""
CODES, SCALES = ("adam_m_codes", "adam_v_codes"), ("adam_m_scales", "adam_v_scales")
"""Moments of 8 bits (``optimizer.state_bits``): a code for each number, and a scale for each block of them."""
CODE_BITS, FEWEST_BLOCKS = 8, 16
"""Bits of a code, and blocks of the smallest weight whose moments are in codes."""
FIRST_MOMENTS = (MOMENT_PREFIXES[0], f"{MUON_MOMENT}.", f"{CODES[0]}.")
"""Every weight that is updated has state whose name begins with one of these."""
MASTER = "master"
"""Begins, with a dot behind it, the name of the float32 copy of a weight in half precision (``optimizer.master_weights``)."""
POWERS = ("beta1_power", "beta2_power")
IMPORTANCE, UNCERTAINTY, KEPT_RANKS, STEPS_TAKEN = "importance", "uncertainty", "kept_ranks", "steps_taken"
PROJECTION, INTERVAL, STEPS_IN_INTERVAL = "projection", "interval", "steps_in_interval"
LAYER_POWERS = ("layer_beta1_power", "layer_beta2_power")
PREFIXES = tuple(
    f"{kind}." for kind in (IMPORTANCE, UNCERTAINTY, KEPT_RANKS, PROJECTION, MUON_MOMENT, MASTER, *CODES, *SCALES)
)
SHARES = "feed_forward.router.balance.shares"
"""Ends the names of what a balance loss over global batches keeps: of all choices of the step before, the part of each expert."""
SCALARS = (*POWERS, STEPS_TAKEN, INTERVAL, STEPS_IN_INTERVAL, *LAYER_POWERS)
"""Names of state that is one number, the same on every rank."""


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


def state_shapes(
    weights: Mapping[str, tuple[int, ...]], optimizer: str = "", block: int = 0
) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the state that every run of an ``optimizer`` (``optimizer.type``) has, from those of the weights it
    updates. All are fp32 but :data:`CODES`, which are uint8.

    ``block``: numbers of a block of moments in codes; 0: none are.
    """
    alone = {name for name, shape in weights.items() if optimizer == MUON and is_orthogonalised(name, shape)}
    coded = {name: shape for name, shape in weights.items() if is_in_codes(shape, block)}
    moments = {
        f"{prefix}{name}": shape
        for prefix in (*MOMENT_PREFIXES, f"{MUON_MOMENT}.")
        for name, shape in weights.items()
        if (name in alone) == (prefix not in MOMENT_PREFIXES) and name not in coded
    }
    codes = {f"{kind}.{name}": shape for kind in CODES for name, shape in coded.items()}
    scales = {f"{kind}.{name}": shape_of_scales(shape, block) for kind in SCALES for name, shape in coded.items()}
    return {**moments, **codes, **scales, **dict.fromkeys(POWERS, ())}


def is_in_codes(shape: tuple[int, ...], block: int) -> bool:
    """Whether a weight's moments are in codes, in blocks of so many numbers (0: none is): those of all but vectors and small
    matrices.
    """
    size = math.prod(shape)
    return block > 0 and len(shape) > 1 and size >= FEWEST_BLOCKS * block and size % block == 0


def shape_of_scales(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Shape of the scales of a weight's blocks, which are cut as it is: blocks follow rows, and lie in them where these have
    room for whole ones.
    """
    rows_hold_blocks = shape[-1] % block == 0
    return (*shape[:-1], shape[-1] // block) if rows_hold_blocks else (math.prod(shape) // block,)


def weight_of_cut_blocks(shapes: Mapping[str, tuple[int, ...]], ranks: int, block: int) -> str:
    """Return the first weight of whose rows so many tensor-parallel ranks would have parts of blocks; empty where none is.

    They cut columns of the projections whose input is split, so blocks must lie in the parts of a row.
    """
    for name, shape in shapes.items():
        cut = name.endswith(tuple(f".{one}.weight" for one in SPLIT_INPUT)) and is_in_codes(shape, block)
        if ranks > 1 and cut and shape[-1] // ranks % block:
            return name
    return ""


def is_orthogonalised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates a weight: all matrices in layers, so neither embedding nor head, and stacks of experts' matrices."""
    return is_of_layer(name) and len(shape) in (2, 3)


def updated_weights(names: Iterable[str]) -> list[str]:
    """The weights of which there is a first moment among ``names``, in their order."""
    return [name.removeprefix(prefix) for name in names for prefix in FIRST_MOMENTS if name.startswith(prefix)]


def further_state(architecture: Architecture) -> Shapes:
    """Shapes by name, all fp32, of what is kept beside the state that every run has, and where this has other shapes."""
    pet = architecture.pet
    of_tuner = FURTHER[pet.tuner.name](architecture, pet) if pet is not None and pet.tuner.name in FURTHER else {}
    return {**of_tuner, **_of_balance(architecture)}


def _of_balance(architecture: Architecture) -> Shapes:
    routers = {
        number: layer.feed_forward.router
        for number, layer in enumerate(architecture.layers)
        if isinstance(layer.feed_forward, ExpertsSpec)
    }
    return {
        f"model.layers.{number}.{SHARES}": (router.experts,)
        for number, router in routers.items()
        if router.remembers_choices
    }


def is_of_layer(name: str) -> bool:
    """Whether a weight belongs to a layer, of which LISA draws some, and not to embeddings, norm or head."""
    return name.startswith("model.layers.")


def is_projected(name: str, shape: tuple[int, ...]) -> bool:
    """Whether GaLore projects the gradient of a weight: those of all matrices in layers."""
    return is_of_layer(name) and len(shape) == 2


def projected_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the projection and of the moments of a matrix: its shorter side is projected."""
    rows, columns = shape
    return ((rank, columns), (rows, rank)) if rows >= columns else ((rows, rank), (rank, columns))


def _of_projections(architecture: Architecture, pet: Tuning) -> Shapes:
    found: Shapes = {STEPS_IN_INTERVAL: ()}
    for name, shape in architecture.trained_shapes().items():
        if is_projected(name, shape):
            projection, low = projected_shapes(shape, pet.galore_rank)
            found |= {f"{PROJECTION}.{name}": projection, **{f"{prefix}{name}": low for prefix in MOMENT_PREFIXES}}
    return found


def _of_drawn_layers(architecture: Architecture, pet: Tuning) -> Shapes:
    return dict.fromkeys((INTERVAL, STEPS_IN_INTERVAL, *LAYER_POWERS), ())


def _of_ranks(architecture: Architecture, pet: Tuning) -> Shapes:
    groups, shapes = triplets(architecture), architecture.trained_shapes()
    names = [name for group in groups for name in (group.first, group.values, *group.seconds)]
    means = {f"{kind}.{name}": shapes[name] for kind in (IMPORTANCE, UNCERTAINTY) for name in names}
    kept = {f"{KEPT_RANKS}.{group.values}": shapes[group.values] for group in groups}
    return {**means, **kept, STEPS_TAKEN: ()}


FURTHER: dict[str, Callable[[Architecture, Tuning], Shapes]] = {
    ADALORA: _of_ranks,
    GALORE: _of_projections,
    LISA: _of_drawn_layers,
}
"""By the tuner whose optimizer keeps it."""


def is_state(name: str) -> bool:
    """Whether a parameter is the optimizer's own, or what it sets for the next step, and belongs into checkpoints."""
    return name in SCALARS or name.startswith((*MOMENT_PREFIXES, *PREFIXES)) or name.endswith(SHARES)


def kind_of_state(name: str) -> str:
    """What a state is, whichever weight or layer it is of: ``adam_m``, ``shares``."""
    return name.rpartition(".")[2] if name.endswith(SHARES) else name.partition(".")[0]
