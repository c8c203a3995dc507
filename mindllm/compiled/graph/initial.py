"""What the parameters of a step begin with: tables, masks, moments, accumulators. Weights are drawn later and are left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mindllm.architecture.optimizer_state import is_state
from mindllm.compiled.execute.state import ACCUMULATORS
from mindllm.models.experts.expert_load import is_probe
from mindllm.models.weights import is_quantized_parameter

if TYPE_CHECKING:
    from mindspore import Parameter, nn

DRAWN, CONSTANT = ("lengths_of", "initial_std"), "constant"
CONSTANT_INITIALIZERS = ("Zero", "One", "Constant")


def leave_undrawn(step: nn.Cell) -> dict[str, np.ndarray]:
    """Before a step is compiled: nothing is drawn for weights that :func:`beginnings` knows by their names.

    MindSpore fills the parameters of a compiled step on the host, at their full widths. Zeros are memory that nobody touches.
    Returns the values of all parameters that are constants, as scalars by name: they need not be read back.
    """
    from mindspore.common.initializer import Zero

    constants = {one.name: value for one in step.get_parameters() if (value := _constant(one)) is not None}
    for parameter in step.get_parameters():
        if parameter.has_init and any(hasattr(parameter, kind) for kind in DRAWN):
            parameter.init_mode.init = Zero()
    return constants


def initial_values(step: nn.Cell, names: Collection[str], constants: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Initial values of the parameters called ``names`` of a training step, those of its weights aside.

    One that is equal everywhere is given as a scalar. One that would be drawn at random has no entry.

    Args:
        constants: what is known of some of them, as :func:`leave_undrawn` returns it.
    """
    expected = set(names)
    found = {
        parameter.name: _initial(parameter, constants)
        for parameter in step.get_parameters()
        if parameter.name in expected and not _is_weight(parameter)
    }
    return {name: value for name, value in found.items() if value is not None}


def beginnings(
    step: nn.Cell, names: Collection[str], constants: Mapping[str, np.ndarray]
) -> dict[str, tuple[Any, ...]]:
    """Return the initial values of weights of a training step that loads none, as plain values.

    Codes of quantized weights, which nothing changes, have no entry. ``constants`` are those of :func:`leave_undrawn`.
    """
    expected = set(names)
    weights = [one for one in step.get_parameters() if one.name in expected and _is_weight(one)]
    found = {one.name: _beginning(one, constants) for one in weights}
    return {name: value for name, value in found.items() if value is not None}


def _beginning(parameter: Parameter, constants: Mapping[str, np.ndarray]) -> tuple[Any, ...] | None:
    if is_quantized_parameter(parameter):
        return None
    for kind in DRAWN:
        if hasattr(parameter, kind):
            return kind, getattr(parameter, kind)
    value = _initial(parameter, constants)
    return None if value is None or value.ndim else (CONSTANT, float(value))


def _is_weight(parameter: Parameter) -> bool:
    """Return True for a weight of the model, trained or frozen; False for tables and copies of weights, such as moments."""
    is_copy = is_state(parameter.name) or parameter.name.startswith(ACCUMULATORS)
    return not (is_copy or getattr(parameter, "is_constant", False) or is_probe(parameter.name))


def _initial(parameter: Parameter, constants: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if parameter.name in constants:
        return constants[parameter.name]
    return None if parameter.has_init else _without_repetition(parameter.asnumpy())


def _constant(parameter: Parameter) -> np.ndarray | None:
    """Return the value of all elements of a parameter that was not filled yet; None if they differ."""
    if not parameter.has_init or type(initializer := parameter.init_mode.init).__name__ not in CONSTANT_INITIALIZERS:
        return None
    from mindspore.common.dtype import dtype_to_nptype

    value = np.zeros(1, dtype_to_nptype(parameter.dtype))
    initializer(value)
    return value.reshape(())


def _without_repetition(array: np.ndarray) -> np.ndarray:
    """Return the array, or a scalar if all its elements are equal."""
    first = array.reshape(-1)[:1]
    return first.reshape(()).copy() if array.size and np.all(array == first) else array
