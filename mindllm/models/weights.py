"""Weights as named arrays: their initial values, reading them from a model and assigning them.

DoRA trains the lengths of the rows of a weight separately from their directions (Liu et al., 2024).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import mindspore as ms
import ml_dtypes
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import Normal, initializer
from mindspore.nn.utils import no_init_parameters
from numpy.typing import ArrayLike

from mindllm.architecture.optimizer_state import SHARES, is_state
from mindllm.config import ModelConfig
from mindllm.models.experts.expert_load import is_probe
from mindllm.quantize import round_tensors

NUMPY_DTYPES: dict[ms.dtype, np.dtype] = {
    ms.float32: np.dtype(np.float32),
    ms.float16: np.dtype(np.float16),
    ms.bfloat16: np.dtype(ml_dtypes.bfloat16),
    ms.int32: np.dtype(np.int32),
    ms.uint8: np.dtype(np.uint8),
}


class WeightType(NamedTuple):
    """The type whose values a weight holds, and the one it is stored in, which is float32 on a CPU."""

    values: ms.dtype
    stored: ms.dtype


FLOAT32 = WeightType(ms.float32, ms.float32)


def make_weight(name: str, initial: str, shape: tuple[int, ...], dtype: WeightType = FLOAT32) -> Parameter:
    """Return a weight that starts with zeros or ones, according to ``initial``."""
    return _typed(Parameter(initializer(initial, shape, dtype.stored), name=name), dtype)


def _typed(parameter: Parameter, dtype: WeightType) -> Parameter:
    if dtype.values != dtype.stored:
        parameter.value_type = dtype.values
    return parameter


def value_type(parameter: Parameter) -> ms.dtype:
    """Return the type whose values a parameter holds, which on a CPU may be stored in float32."""
    return getattr(parameter, "value_type", parameter.dtype)


def is_half(parameter: Parameter) -> bool:
    """Return True if a parameter holds values of half precision, however they are stored."""
    return value_type(parameter) in (ms.float16, ms.bfloat16)


def row_lengths(weight: np.ndarray) -> np.ndarray:
    """Euclidean length of every row of ``[out, in]``, fp32 ``[out]``."""
    return np.sqrt(np.square(weight, dtype=np.float64).sum(axis=1)).astype(np.float32)


@dataclass(frozen=True)
class InitStd:
    """Standard deviations of initial weights: ``inner`` ones, and ``output`` ones, which end a residual branch."""

    inner: float
    output: float

    @staticmethod
    def of(model: ModelConfig) -> InitStd:
        """Return GPT-2's deviations: each layer adds branches, so the outputs of branches shrink with their number."""
        return InitStd(model.initializer_range, model.initializer_range / math.sqrt(2 * model.num_layers))


@contextlib.contextmanager
def values_follow() -> Iterator[None]:
    """Weights of models that are built inside have no values yet: :func:`assign` or :func:`initialise` puts them into all.

    MindSpore would draw every one of them first, which takes 5 seconds for 135 million.
    """
    with no_init_parameters():
        yield


def normal_parameter(name: str, shape: tuple[int, ...], std: float, dtype: WeightType = FLOAT32) -> Parameter:
    """Return a weight drawn from ``N(0, std²)``: lazily by MindSpore in a parallel run, by :func:`initialise` otherwise."""
    parameter = _typed(Parameter(initializer(Normal(sigma=std), shape, dtype.stored), name=name), dtype)
    parameter.initial_std = std
    return parameter


def frozen_parameter(weight: Parameter, dtype: ms.dtype) -> Parameter:
    """Return a frozen weight in ``dtype`` with the same name and initial values."""
    std = weight.initial_std
    parameter = Parameter(initializer(Normal(sigma=std), weight.shape, dtype), name=weight.name, requires_grad=False)
    parameter.initial_std = std
    return parameter


def constant(name: str, value: np.ndarray) -> Parameter:
    """Return a tensor of the graph that is neither trained nor saved."""
    parameter = Parameter(Tensor(value), name=name, requires_grad=False)
    parameter.is_constant = True
    return parameter


def trained_weights(model: nn.Cell) -> dict[str, Parameter]:
    """Return the trained parameters by name, without tables, masks and counters of the graph."""
    return {parameter.name: parameter for parameter in model.trainable_params() if not is_probe(parameter.name)}


def model_weights(model: nn.Cell) -> dict[str, Parameter]:
    """Return all weights by name, including frozen ones, without tables, masks, counters and state of steps."""
    return {item.name: item for item in model.get_parameters() if _is_weight(item)}


def shares_of(model: nn.Cell) -> list[Parameter]:
    """By which a balance loss over global batches knows the choices of the step before, one for each router that has it."""
    return [item for item in model.get_parameters() if item.name.endswith(SHARES)]


def quantized_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """Return the tensors of quantized projections by name. They are neither trained nor saved."""
    return {item.name: item for item in model.get_parameters() if is_quantized_parameter(item)}


def is_quantized_parameter(parameter: Parameter) -> bool:
    """Return True for a tensor of a quantized projection."""
    return hasattr(parameter, "code_of")


def _is_weight(parameter: Parameter) -> bool:
    is_constant = getattr(parameter, "is_constant", False)
    return not (is_constant or is_probe(parameter.name) or is_state(parameter.name))


def initialise(parameters: Mapping[str, Parameter], seed: int) -> None:
    """Draws every weight that is drawn as a function of ``(seed, parameter name)`` alone; others get or keep ones or zeros."""
    for name, parameter in parameters.items():
        value = drawn_value(name, tuple(parameter.shape), parameter, seed)
        if value is not None:
            parameter.set_data(Tensor(in_value_type(value, parameter), parameter.dtype))
        elif parameter.has_init:
            parameter.init_data()


def drawn_value(name: str, shape: tuple[int, ...], parameter: Parameter, seed: int) -> np.ndarray | None:
    """Return the initial value of the whole weight ``name`` of ``shape``, or None for ones or zeros.

    ``parameter``: the weight, or a part of it. With ``initial_std`` it is drawn. With ``lengths_of`` (name, shape and deviation
    of another weight) it starts with the row lengths of that one. With ``code_of`` (additionally a specification of codes) it is
    a part of the codes of that one.
    """
    if is_quantized_parameter(parameter):
        weight, full_shape, std, spec = parameter.code_of
        return round_tensors(initial_value(weight, full_shape, std, seed), spec)[name.rpartition(".")[2]]
    if hasattr(parameter, "lengths_of"):
        weight, full_shape, std = parameter.lengths_of
        return row_lengths(initial_value(weight, full_shape, std, seed))
    if hasattr(parameter, "initial_std"):
        return initial_value(name, shape, parameter.initial_std, seed)
    return None


def initial_value(name: str, shape: tuple[int, ...], std: float, seed: int) -> np.ndarray:
    """Return the whole weight ``name`` from ``N(0, std²)``, fp32, drawn from ``(seed, name)``.

    So a weight does not depend on how many layers, devices or other parameters there are (counter-based generator:
    Salmon et al., 2011).
    """
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)


def in_value_type(array: np.ndarray, parameter: Parameter) -> np.ndarray:
    """Return ``array`` rounded to the values that ``parameter`` can represent, or unchanged if it is stored in their type."""
    rounds = hasattr(parameter, "value_type")
    return array.astype(NUMPY_DTYPES[parameter.value_type], copy=False) if rounds else array


class HostCopy:
    """A parameter that is copied to the host, in the type of its values, when it is asked for its array, and not before."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.shape: tuple[int, ...] = tuple(parameter.shape)
        self.dtype: np.dtype = NUMPY_DTYPES[value_type(parameter)]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.parameter.asnumpy().astype(dtype or self.dtype, copy=False)


def signatures(parameters: Mapping[str, Parameter]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of every parameter, which a checkpoint must match."""
    copies = {name: HostCopy(parameter) for name, parameter in parameters.items()}
    return {name: (copy.shape, copy.dtype) for name, copy in copies.items()}


def assign(parameters: Mapping[str, Parameter], arrays: Mapping[str, ArrayLike], in_place: bool = False) -> None:
    """Copy ``arrays``, which may be lazy, into the parameters of these names.

    Shapes must be those of :func:`signatures`; values are rounded to the dtypes of the parameters. A source that creates a new
    array for each reader (``creates_array``) is not copied if it has the dtype of its parameter.

    ``in_place``: a compiled graph has used the parameters and keeps their memory. After ``set_data`` it would see the new values
    of some parameters but not of the moments that it updates, and one of two graphs would see none (MindSpore 2.10 on a CPU).
    """
    for name, parameter in parameters.items():
        array = in_value_type(np.asarray(arrays[name]), parameter)
        if in_place:
            parameter.copy_(Tensor(np.array(array), parameter.dtype))
        elif getattr(arrays[name], "creates_array", False) and array.dtype == NUMPY_DTYPES.get(parameter.dtype):
            parameter.set_data(Tensor.from_numpy(array) if array.dtype.kind == "f" else Tensor(array))
        else:
            parameter.set_data(Tensor(np.array(array), parameter.dtype))
