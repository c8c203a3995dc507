"""Weights in half precision in a step: state in float32, sums in float32, and rounding where weights are stored wider.

MindFormers 1.0 to 1.9 does the same in ``FP32StateAdamWeightDecay``, ``AdamW``, ``FusedAdamWeightDecay`` and ``PmaAdamW``.
Moments are float32 whatever the weight is. The weight is cast to float32, decayed and updated there, and cast back; no float32
copy stays. Gradients and accumulators (``accu_grads``, cloned from the weights) have the weight's type, and clipping casts a
scaled gradient back to that type before the update reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindllm.models.weights import value_type


def clone_state(
    weights: ParameterTuple, prefix: str, init: str = "zeros", dtype: ms.dtype = ms.float32
) -> ParameterTuple:
    """Return a tensor per weight with its shape and layout, in ``dtype``, named ``prefix.<weight>``."""
    return ParameterTuple([_clone(weight, prefix, init, dtype) for weight in weights])


def _clone(weight: Parameter, prefix: str, init: str, dtype: ms.dtype) -> Parameter:
    if weight.dtype == dtype:
        return ParameterTuple([weight]).clone(prefix=prefix, init=init)[0]
    # ``Parameter.clone`` keeps the type. The compiler finds the layout of a clone through ``cloned_obj``.
    clone = Parameter(initializer(init, weight.shape, dtype))
    clone.param_info = weight.param_info.clone()
    weight.param_info.cloned_obj = [*getattr(weight.param_info, "cloned_obj", []), clone]
    clone.is_init = False
    clone.set_data(initializer(init, weight.shape, dtype))
    clone.name = f"{prefix}.{weight.name}"
    return clone


# The compiler removes casts to the type a tensor has. A condition on it would be a branch of the graph.
def in_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32. A scalar factor does not widen a tensor, so products with one need it."""
    return ops.cast(x, ms.float32)


def rounded_to(x: Tensor, dtype: ms.dtype) -> Tensor:
    """Return float32 ``x`` with values of ``dtype``."""
    return ops.cast(ops.cast(x, dtype), ms.float32)


def put(weight: Tensor, value: Tensor, dtype: ms.dtype) -> Tensor:
    """Assign float32 ``value``, rounded to the values of ``dtype``, to a weight."""
    return ops.assign(weight, ops.cast(ops.cast(value, dtype), weight.dtype))


def stores_half(parameters: Iterable[Parameter]) -> bool:
    """Return True if any of the parameters is stored in half precision, as on a device."""
    return any(item.dtype in (ms.float16, ms.bfloat16) for item in parameters)


def value_types(parameters: Iterable[Parameter]) -> tuple[ms.dtype, ...]:
    """Return the type whose values each parameter holds."""
    return tuple(value_type(item) for item in parameters)


class ValueRounding(nn.Cell):
    """Round tensors to the values that weights hold, where these are stored wider, as on a CPU.

    ``is_needed`` is False where every weight is stored in the type of its values: the device rounds by itself.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.types = value_types(parameters)
        self.rounds = tuple(item.dtype != held for item, held in zip(parameters, self.types, strict=True))
        self.is_needed = any(self.rounds)

    def construct(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors, one per weight, rounded."""
        result: tuple[Tensor, ...] = ()
        for index in range(len(self.types)):
            one = tensors[index]
            result = (*result, rounded_to(one, self.types[index]) if self.rounds[index] else one)
        return result


def value_rounding(parameters: Sequence[Parameter]) -> ValueRounding | None:
    """Return what rounds tensors of these weights; None where nothing must be rounded."""
    rounding = ValueRounding(parameters)
    return rounding if rounding.is_needed else None
