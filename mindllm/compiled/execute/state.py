"""Parameters of ranks and of the whole: cutting whole tensors into every rank's part, and putting parts together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mindllm.compiled.execute.machine import Machine
from mindllm.compiled.graph import CompiledGraph, Parameter
from mindllm.errors import RunFailed

ACCUMULATORS = "accu_grads."
MOMENTS = ("adam_m.", "adam_v.")


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter: where in the whole it lies, and its values."""

    rank: int
    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    value: np.ndarray


def slices_of(parameter: Parameter, rank: int) -> tuple[slice, ...]:
    """Where in the whole tensor the part of ``rank`` lies."""
    if parameter.layout is None:
        return tuple(slice(0, size) for size in parameter.shape)
    return parameter.layout.slices(rank)


def whole_shape(parameter: Parameter) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    return parameter.shape if parameter.layout is None else parameter.layout.full_shape


def initial_parts(graph: CompiledGraph, whole: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters of a rank at the beginning: its parts of ``whole``; gradients are accumulated from zero.

    Raises:
        RunFailed: a parameter of the graph that ``whole`` lacks, or a part whose shape is not that of the graph.
    """
    return {name: _part(graph.rank, parameter, whole) for name, parameter in graph.parameters.items()}


def _part(rank: int, parameter: Parameter, whole: Mapping[str, np.ndarray]) -> np.ndarray:
    if parameter.name.startswith(ACCUMULATORS):
        return np.zeros(parameter.shape, np.float32)
    if parameter.name not in whole:
        raise RunFailed(f"rank {rank} has a parameter {parameter.name} that a single device does not have")
    value = np.asarray(whole[parameter.name])[slices_of(parameter, rank)]
    if value.shape != parameter.shape:
        raise RunFailed(
            f"rank {rank}: its layout gives {parameter.name} the shape {list(value.shape)}, its graph {list(parameter.shape)}"
        )
    return value


def state_parts(machine: Machine) -> Iterator[Part]:
    """What a rank answers for: weights it updates, and its optimizer state; no tables, accumulators or copies."""
    parameters = machine.graph.parameters
    for name, parameter in parameters.items():
        if name.startswith(MOMENTS) or f"{MOMENTS[0]}{name}" in parameters or name.endswith("_power"):
            value = machine.parameters[name].value
            yield Part(machine.rank, name, whole_shape(parameter), slices_of(parameter, machine.rank), value)


def gathered(parts: Iterable[Part]) -> dict[str, np.ndarray]:
    """Whole tensors from the parts of all ranks.

    Raises:
        RunFailed: parts that leave a hole, or copies of a part that are not bit-equal.
    """
    whole: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for part in parts:
        tensor = whole.setdefault(part.name, np.zeros(part.shape, part.value.dtype))
        known = filled.setdefault(part.name, np.zeros(part.shape, bool))
        if known[part.slices].all() and not np.array_equal(tensor[part.slices], part.value, equal_nan=True):
            raise RunFailed(f"rank {part.rank} holds another copy of {part.name} than the ranks before it")
        tensor[part.slices], known[part.slices] = part.value, True
    holes = [name for name, known in filled.items() if not known.all()]
    if holes:
        raise RunFailed(f"no rank holds all of {', '.join(holes)}")
    return whole
