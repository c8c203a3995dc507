"""What dropout costs: the mask that says where zeros are, and the results with zeros among them.

Four forms are known. *drawn*: in the graph, from numbers of tokens, and once more for the gradient (``models/dropout.py``).
*kept*: as that, and the mask is kept, as on a CPU. *kernel*: one kernel draws the mask and applies it, as MindSpore's own
``Dropout`` does. *fused*: as that, but what is added to the residual is dropped where it is added, as in Megatron-LM (Narayanan
et al., 2021, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES, MASK, Operator, elementwise, size_of
from mindllm.timing.workload import Numerics

OPERATORS = ("bits", "kept", "cast")  # that make a mask
DRAWN_AGAIN = tuple(f"dropout.{one}" for one in OPERATORS)
"""Ends of names of operators that are repeated in any plan."""
OF_MASK = (*DRAWN_AGAIN, *(f"dropout.once.{one}" for one in OPERATORS))
"""Ends of names of operators that make a mask, and have no gradient."""
OF_RESULTS = ("dropout.mul", "dropout.rescale", "dropout")
"""Ends of names of operators whose gradient is as much work."""


def mask_bytes(numerics: Numerics) -> float:
    """Bytes that are kept of a mask for each number: a drawn one in the type of the results, a kernel's a byte."""
    return {"drawn": 0, "kept": size_of(numerics.compute)}.get(numerics.dropout, 1)


def dropout_work(name: str, size: float, numerics: Numerics) -> Iterator[Operator]:
    """Dropout of what would be ``size`` bytes in half precision, by kernels of its own."""
    result = size_of(numerics.compute) / HALF_BYTES
    if numerics.dropout not in ("drawn", "kept"):
        yield elementwise(name, size, 2 * result + MASK)
        return
    bits = FP32_BYTES / HALF_BYTES  # a 32-bit number for each; what it is made of is small
    mask = f"{name}.once" if numerics.dropout == "kept" else name
    for operator, passes in zip(OPERATORS, (bits, bits + MASK, MASK + result), strict=True):
        yield elementwise(f"{mask}.{operator}", size, passes)
    yield elementwise(f"{name}.mul", size, 3 * result)
    yield elementwise(f"{name}.rescale", size, 2 * result)
