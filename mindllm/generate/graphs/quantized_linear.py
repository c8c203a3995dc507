"""Predicting on Ascend, projections in integer codes are multiplied by ``WeightQuantBatchMatmul``: their matrices are never made.

The operator has no gradient in MindSpore 2.10, so nothing that trains uses it. What it does not take keeps the composition of
``models/dequantize.py``: values of a table (NF4, FP4, E4M3), products in fp32, groups of a size that it does not have
(``quantize/codes.py``). This was never run on a device; ``docs/quantization.md`` says what was proved without one.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.ops.auto_generate import WeightQuantBatchMatmul

from mindllm.architecture.quantization import CODES, COLUMNS, SCALES, CodeSpec, bits_of
from mindllm.config import ModelConfig
from mindllm.models import CausalLM, Kernels
from mindllm.models.linear import Linear
from mindllm.models.weights import NUMPY_DTYPES
from mindllm.quantize import Codes, Integers, fits_integers, to_integers

OPERANDS = (ms.float16, ms.bfloat16)
OFFSETS = "offsets"
ROUNDING = 2.0**-8  # the most by which rounding to bf16 moves a number, relative to it


class QuantizedLinear(nn.Cell):
    """``[tokens, in] -> [tokens, out]`` in the compute dtype, in the place of a :class:`Linear` that is held in codes."""

    def __init__(self, linear: Linear, matrix: Integers, dtype: ms.dtype) -> None:
        super().__init__(auto_prefix=False)
        spec, path = linear.held.spec, linear.held.codes.name.removesuffix(f".{CODES}")
        self.operand = linear.operand
        packed = ms.qint4x2 if bits_of(spec.code) == 4 else ms.int8
        self.codes = _constant(f"{path}.{CODES}", matrix.codes, packed)
        self.scales = _constant(f"{path}.{SCALES}", matrix.scales, dtype)
        self.offsets = None if matrix.offsets is None else _constant(f"{path}.{OFFSETS}", matrix.offsets, dtype)
        self.ordered = matrix.columns is not None
        if matrix.columns is not None:
            self.columns = _constant(f"{path}.{COLUMNS}", matrix.columns, ms.int32)
            self.gather = P.Gather()
        group = spec.group if spec.group < spec.in_features else 0  # which is how it is told of whole rows
        self.matmul = WeightQuantBatchMatmul(False, False, group)
        self.has_bias, self.has_activation = linear.has_bias, linear.has_activation
        if linear.has_bias:
            self.bias, self.bias_add = linear.bias, linear.bias_add
            self.cast = P.Cast()
        if linear.has_activation:
            self.activation = linear.activation

    def construct(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """As :class:`Linear`; ``random`` is not used."""
        x = self.operand(x)
        if self.ordered:
            x = self.gather(x, self.columns, 1)
        y = self.matmul(x, self.codes, self.scales, self.offsets)
        if self.has_bias:
            y = self.bias_add(y, self.cast(self.bias, y.dtype))
        return self.activation(y) if self.has_activation else y


def use_quantized_products(lm: CausalLM, model: ModelConfig, kernels: Kernels) -> None:
    """Puts such products in the place of the projections of ``lm`` that allow it, with the codes that it holds now.

    Call it when codes are loaded, on a model that is only predicted with.
    """
    if kernels.operand not in OPERANDS:
        return
    for layer, spec in zip(lm.model.layers, model.architecture.layers, strict=True):
        for code in filter(fits_integers, spec.codes):
            _replace(layer, code, kernels.operand)


def _replace(layer: nn.Cell, spec: CodeSpec, dtype: ms.dtype) -> None:
    """One projection of a layer; it stays as it is beside an adapter, or where ``dtype`` cannot hold its scales."""
    *path, name = spec.module.split(".")
    parent = layer
    for part in path:
        parent = getattr(parent, part)
    linear = getattr(parent, name)
    if linear.has_adapter or not _can_hold(linear.held.scales.asnumpy(), dtype):
        return
    tensors = {name: getattr(linear.held, name).asnumpy() for name in spec.shapes()}
    product = QuantizedLinear(linear, to_integers(Codes.from_tensors(spec.code, tensors)), dtype)
    names = {parameter: parameter.name for parameter in product.get_parameters()}
    setattr(parent, name, product)
    for parameter, full in names.items():  # which have become names below ``parent``
        parameter.name = full


def _can_hold(scales: np.ndarray, dtype: ms.dtype) -> bool:
    """Whether ``dtype`` has numbers close to all of these: fp16 has few below 6e-5, and none above 65504."""
    with np.errstate(over="ignore"):
        rounded = scales.astype(NUMPY_DTYPES[dtype]).astype(np.float32)
    return np.allclose(rounded, scales, rtol=ROUNDING, atol=0.0)


def _constant(name: str, value: np.ndarray, dtype: ms.dtype) -> Parameter:
    parameter = Parameter(Tensor(value, dtype), name=name, requires_grad=False)
    parameter.is_constant = True
    return parameter
