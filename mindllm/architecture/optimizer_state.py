"""Optimizer state: names and shapes, without building a model. Tuning methods have additional state."""

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
"""Prefix, followed by a dot, of the float32 copy of a half-precision weight (``optimizer.master_weights``)."""
POWERS = ("beta1_power", "beta2_power")
IMPORTANCE, UNCERTAINTY, KEPT_RANKS, STEPS_TAKEN = "importance", "uncertainty", "kept_ranks", "steps_taken"
PROJECTION, INTERVAL, STEPS_IN_INTERVAL = "projection", "interval", "steps_in_interval"
LAYER_POWERS = ("layer_beta1_power", "layer_beta2_power")
PREFIXES = tuple(
    f"{kind}." for kind in (IMPORTANCE, UNCERTAINTY, KEPT_RANKS, PROJECTION, MUON_MOMENT, MASTER, *CODES, *SCALES)
)
SHARES = "feed_forward.router.balance.shares"
"""Suffix of the state of a balance loss over global batches: the share of each expert in the choices of the previous step."""
SCALARS = (*POWERS, STEPS_TAKEN, INTERVAL, STEPS_IN_INTERVAL, *LAYER_POWERS)
"""Names of state that is one number, the same on every rank."""


@dataclass(frozen=True)
class Triplets:
    """One adapter of AdaLoRA by the names of its weights: A, E, and B, in parts where projections of ours share the others."""

    first: str
    values: str
    seconds: tuple[str, ...]


def triplets(architecture: Architecture) -> tuple[Triplets, ...]:
    """Return all adapters of a model with rank allocation."""
    return tuple(_triplets(architecture))


def _triplets(architecture: Architecture) -> Iterator[Triplets]:
    for number, layer in enumerate(architecture.layers):
        together: dict[str, list[str]] = {}
        for adapter in layer.adapters:
            together.setdefault(adapter.first_matrix_of or adapter.module, []).append(adapter.module)
        for first, modules in together.items():
            path = f"model.layers.{number}"
            yield Triplets(
                f"{path}.{first}.{A}", f"{path}.{first}.{VALUES}", tuple(f"{path}.{module}.{B}" for module in modules)
            )


def state_shapes(
    weights: Mapping[str, tuple[int, ...]], optimizer: str = "", block: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name of the state of an ``optimizer`` (``optimizer.type``), from the shapes of updated weights.

    All are fp32 except :data:`CODES`, which are uint8. ``block``: numbers per block of quantized moments; 0 without quantization.
    """
    orthogonal = {name for name, shape in weights.items() if optimizer == MUON and is_orthogonalised(name, shape)}
    coded = {name: shape for name, shape in weights.items() if is_in_codes(shape, block)}
    moments = {
        f"{prefix}{name}": shape
        for prefix in (*MOMENT_PREFIXES, f"{MUON_MOMENT}.")
        for name, shape in weights.items()
        if (name in orthogonal) == (prefix not in MOMENT_PREFIXES) and name not in coded
    }
    codes = {f"{kind}.{name}": shape for kind in CODES for name, shape in coded.items()}
    scales = {f"{kind}.{name}": shape_of_scales(shape, block) for kind in SCALES for name, shape in coded.items()}
    return {**moments, **codes, **scales, **dict.fromkeys(POWERS, ())}


def is_in_codes(shape: tuple[int, ...], block: int) -> bool:
    """Return True if the moments of a weight are quantized: all except vectors and small matrices, if ``block`` is not 0."""
    size = math.prod(shape)
    return block > 0 and len(shape) > 1 and size >= FEWEST_BLOCKS * block and size % block == 0


def shape_of_scales(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return the shape of the scales of a weight's blocks. Blocks follow rows, and stay within rows that have complete blocks."""
    rows_hold_blocks = shape[-1] % block == 0
    return (*shape[:-1], shape[-1] // block) if rows_hold_blocks else (math.prod(shape) // block,)


def weight_of_cut_blocks(shapes: Mapping[str, tuple[int, ...]], ranks: int, block: int) -> str:
    """Return the first weight whose blocks tensor-parallel ranks would split; empty if there is none.

    Ranks split the columns of projections with a split input, so blocks must stay within the parts of a row.
    """
    for name, shape in shapes.items():
        cut = name.endswith(tuple(f".{projection}.weight" for projection in SPLIT_INPUT)) and is_in_codes(shape, block)
        if ranks > 1 and cut and shape[-1] // ranks % block:
            return name
    return ""


def is_orthogonalised(name: str, shape: tuple[int, ...]) -> bool:
    """Return True if Muon updates a weight: matrices in layers and stacks of expert matrices, not embedding and head."""
    return is_of_layer(name) and len(shape) in (2, 3)


def updated_weights(names: Iterable[str]) -> list[str]:
    """Return the weights with a first moment among ``names``, in order."""
    return [name.removeprefix(prefix) for name in names for prefix in FIRST_MOMENTS if name.startswith(prefix)]


def further_state(architecture: Architecture) -> Shapes:
    """Return the shapes by name, all fp32, of additional optimizer state, or of state with other shapes."""
    pet = architecture.pet
    tuner_state = (
        ADDITIONAL_STATE[pet.tuner.name](architecture, pet)
        if pet is not None and pet.tuner.name in ADDITIONAL_STATE
        else {}
    )
    return {**tuner_state, **_balance_state(architecture)}


def _balance_state(architecture: Architecture) -> Shapes:
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
    """Return True if a weight belongs to a layer, as drawn by LISA, and not to embeddings, norm or head."""
    return name.startswith("model.layers.")


def is_projected(name: str, shape: tuple[int, ...]) -> bool:
    """Return True if GaLore projects the gradient of a weight: all matrices in layers."""
    return is_of_layer(name) and len(shape) == 2


def projected_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the projection and of the moments of a matrix, whose shorter side is projected."""
    rows, columns = shape
    return ((rank, columns), (rows, rank)) if rows >= columns else ((rows, rank), (rank, columns))


def _projection_state(architecture: Architecture, pet: Tuning) -> Shapes:
    shapes: Shapes = {STEPS_IN_INTERVAL: ()}
    for name, shape in architecture.trained_shapes().items():
        if is_projected(name, shape):
            projection, low = projected_shapes(shape, pet.galore_rank)
            shapes |= {f"{PROJECTION}.{name}": projection, **{f"{prefix}{name}": low for prefix in MOMENT_PREFIXES}}
    return shapes


def _drawn_layer_state(architecture: Architecture, pet: Tuning) -> Shapes:
    return dict.fromkeys((INTERVAL, STEPS_IN_INTERVAL, *LAYER_POWERS), ())


def _rank_state(architecture: Architecture, pet: Tuning) -> Shapes:
    groups, shapes = triplets(architecture), architecture.trained_shapes()
    names = [name for group in groups for name in (group.first, group.values, *group.seconds)]
    means = {f"{kind}.{name}": shapes[name] for kind in (IMPORTANCE, UNCERTAINTY) for name in names}
    kept_shapes = {f"{KEPT_RANKS}.{group.values}": shapes[group.values] for group in groups}
    return {**means, **kept_shapes, STEPS_TAKEN: ()}


ADDITIONAL_STATE: dict[str, Callable[[Architecture, Tuning], Shapes]] = {
    ADALORA: _rank_state,
    GALORE: _projection_state,
    LISA: _drawn_layer_state,
}
"""By the tuner whose optimizer keeps it."""


def is_state(name: str) -> bool:
    """Return True if a parameter is optimizer state, or is set by the optimizer for the next step, and belongs in checkpoints."""
    return name in SCALARS or name.startswith((*MOMENT_PREFIXES, *PREFIXES)) or name.endswith(SHARES)


def kind_of_state(name: str) -> str:
    """Return the kind of a state without the weight or layer: ``adam_m``, ``shares``."""
    return name.rpartition(".")[2] if name.endswith(SHARES) else name.partition(".")[0]
