"""Parameters of ranks and of the whole: cutting whole tensors into every rank's part, and putting parts together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import is_state, updated_weights
from mindllm.compiled.execute.kernels import ROUNDED
from mindllm.compiled.execute.rank_interpreter import RankInterpreter
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Parameter
from mindllm.errors import RunFailed
from mindllm.train.checkpoint.parts import Part
from mindllm.train.checkpoint.tensors import read_slices

ACCUMULATORS = "accu_grads."


def slices_of(parameter: Parameter, rank: int) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that ``rank`` has."""
    if parameter.layout is None:
        return tuple(slice(0, size) for size in parameter.shape)
    return parameter.layout.slices(rank)


def whole_shape(parameter: Parameter) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    return parameter.shape if parameter.layout is None else parameter.layout.full_shape


def initial_parts(graph: CompiledGraph, whole: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a rank's initial parameters: its parts of ``whole``, arrays or tensors of a checkpoint.

    What ``whole`` does not have (tables, accumulators, optimizer state at the start of a run) begins as it does in the graph.

    Raises:
        RunFailed: a parameter that neither has, or a part whose shape is not that of the graph.
    """
    return {name: _part(graph.rank, parameter, whole) for name, parameter in graph.parameters.items()}


def _part(rank: int, parameter: Parameter, whole: Mapping[str, Any]) -> np.ndarray:
    if parameter.name in whole:
        value = read_slices(whole[parameter.name], slices_of(parameter, rank))
    elif parameter.initial is not None and not parameter.initial.ndim:
        value = np.full(parameter.shape, parameter.initial)
    elif parameter.initial is not None:
        is_cut = parameter.initial.shape == parameter.shape  # the compiler cuts tables that devices share
        value = parameter.initial if is_cut else parameter.initial[slices_of(parameter, rank)]
    else:
        raise RunFailed(f"rank {rank} has a parameter {parameter.name} that a single device does not have")
    if value.shape != parameter.shape:
        raise RunFailed(
            f"rank {rank}: its layout gives {parameter.name} the shape {list(value.shape)}, its graph {list(parameter.shape)}"
        )
    return _rounded(value, parameter.dtype)


def _rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """Round a value to the type of a parameter. Types that numpy lacks are stored in fp32."""
    if dtype not in ROUNDED:
        return value.astype(np.float32) if value.dtype in ROUNDED.values() else value
    if value.dtype.kind == "V":  # files of numpy keep the bytes of bfloat16, and not its name
        value = value.view(ROUNDED[dtype])
    held = value.astype(ROUNDED[dtype], copy=False)
    return held if dtype == "float16" else held.astype(np.float32)


def state_parts(machine: RankInterpreter) -> dict[str, Part]:
    """Return a rank's parts of updated weights and optimizer state, without tables, accumulators and copies."""
    parameters = machine.graph.parameters
    updated = set(updated_weights(parameters))
    return {
        name: Part(whole_shape(parameter), slices_of(parameter, machine.rank), _stored(machine, name))
        for name, parameter in parameters.items()
        if is_state(name) or name in updated
    }


def _stored(machine: RankInterpreter, name: str) -> np.ndarray:
    """Return what a parameter holds in its own type."""
    parameter = machine.parameters[name]
    return parameter.value if parameter.holds is None else parameter.value.astype(parameter.holds)


def put_parts(machine: RankInterpreter, whole: Mapping[str, Any]) -> None:
    """Replace a rank's parts of these tensors, arrays or tensors of a checkpoint, where it has any."""
    for name, parameter in machine.graph.parameters.items():
        if name in whole:
            machine.parameters[name].value = _part(machine.rank, parameter, whole)
