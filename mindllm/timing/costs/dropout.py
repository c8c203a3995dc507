"""What dropout costs: the mask that says where zeros are, and the results with zeros among them.

Three forms are known. *drawn*: in the graph, from numbers of tokens (``models/dropout.py``). *kernel*: one kernel draws the
mask and applies it, as MindSpore's own ``Dropout`` does. *fused*: as that, but what is added to the residual is dropped where
it is added, as in Megatron-LM (Narayanan et al., 2021, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES, MASK, Operator, elementwise, size_of
from mindllm.timing.workload import Numerics

OF_MASK, OF_RESULTS = ("dropout.bits", "dropout.kept", "dropout.cast"), ("dropout.mul", "dropout.rescale", "dropout")
"""Ends of names: of operators that make a mask and have no gradient, and of those whose gradient is as much work."""


def mask_bytes(numerics: Numerics) -> float:
    """Bytes that are kept of a mask for each number: a drawn one in the type of the results, a kernel's a byte."""
    return size_of(numerics.compute) if numerics.dropout == "drawn" else 1


def dropout_work(name: str, size: float, numerics: Numerics) -> Iterator[Operator]:
    """Dropout of what would be ``size`` bytes in half precision, by kernels of its own."""
    result = size_of(numerics.compute) / HALF_BYTES
    if numerics.dropout != "drawn":
        yield elementwise(name, size, 2 * result + MASK)
        return
    bits = FP32_BYTES / HALF_BYTES  # a 32-bit number for each; what it is made of is small
    passes = {"bits": bits, "kept": bits + MASK, "cast": MASK + result, "mul": 3 * result, "rescale": 2 * result}
    yield from (elementwise(f"{name}.{operator}", size, each) for operator, each in passes.items())
