"""The matrix that is made of codes, as a CPU makes it and as a device does."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindllm.architecture.quantization import CodeSpec
from mindllm.models.dequantize import DequantizedWeight
from mindllm.quantize import round_tensors

WEIGHT = np.random.default_rng(0).normal(0, 0.1, (6, 16)).astype(np.float32)
SPEC = CodeSpec(module="w1", out_features=6, in_features=16, code="uint4", group=8, has_zeros=True, ordered=False)


def matrix(cpu: bool, shapes: list[tuple[int, ...]] | None = None) -> np.ndarray:
    """The matrix of the codes of ``WEIGHT``; ``shapes`` receives those of operands of elementwise operators."""
    held = DequantizedWeight(SPEC, cpu)
    for name, value in round_tensors(WEIGHT, SPEC).items():
        getattr(held, name).set_data(Tensor(value))
    for name in ("subtract", "multiply") if shapes is not None else ():
        setattr(held, name, watched(getattr(held, name), shapes))
    return held.construct(Tensor(np.ones((1, 16), np.float32))).asnumpy()


def watched(operator, shapes):
    def call(first, second):
        shapes.extend([first.shape, second.shape])
        return operator(first, second)

    return call


def test_operands_have_one_shape_on_a_cpu():
    """Its kernels keep 16 bytes for every element of a result whose operands differ."""
    ms.set_device("CPU")
    shapes: list[tuple[int, ...]] = []
    found = matrix(True, shapes)
    assert set(shapes) == {(6, 2, 4, 2)}
    np.testing.assert_array_equal(found, matrix(False))
    np.testing.assert_allclose(found, WEIGHT, atol=0.03)
