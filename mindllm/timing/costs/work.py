"""What is timed, as values: operators that compute, and exchanges between devices. How long they take is another matter.

An operator knows its arithmetic and traffic, an exchange its bytes and the axis of the mesh its group lies along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matrix", "attention", "vector"]
MATRIX: Kind = "matrix"
ATTENTION: Kind = "attention"
VECTOR: Kind = "vector"
Axis = Literal[
    "tp",
    "cp",
    "dp",
    "pp",
    "etp",
    "ep",
    "ep over cp",
    "replica",
    "all",
    "share",
    "shares",
    "tp and share",
    "stage share",
    "expert share",
    "expert shares",
]
HALF_BYTES = 2  # bytes of a number in half precision
FP32_BYTES = 4  # and in single precision
HALVES = ("float16", "bfloat16")  # types of half precision
NORM_PASSES = (2.0, 4.0)  # tensors that a norm reads and writes, forward and backward
MASK = 0.5  # of a half-precision tensor: a mask of a byte for each number


@dataclass(frozen=True)
class Operator:
    """One operator on one device.

    Attributes:
        name: path inside its layer, as patterns of ``recompute_config`` see it.
        flops: of matrix products, or of attention.
        bytes: read and written.
        sizes: rows, inner and columns of one product; empty for others.
        dtype: of the operands.
        head: numbers of a query in one head of attention; 0: not known.
        masked: scores of attention whose mask the kernel reads, a byte for each, and applies.
    """

    name: str
    kind: Kind
    flops: float = 0.0
    bytes: float = 0.0
    sizes: tuple[float, float, float] | tuple[()] = ()
    dtype: str = "bfloat16"
    head: float = 0.0
    masked: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """One collective: ``bytes`` of the whole tensor (what an AllGather yields, a ReduceScatter or a rank's AlltoAll
    is given), or of the block that a rank sends round a ring.
    """

    name: str
    op: str
    bytes: float
    axis: Axis = "tp"


Work = tuple[Operator | Exchange, ...]


def size_of(dtype: str) -> int:
    """Bytes of a number."""
    return HALF_BYTES if dtype in HALVES else FP32_BYTES


def product(name: str, rows: float, inner: float, columns: float, dtype: str, batch: float = 1.0) -> Operator:
    """``batch`` products ``[rows, inner] x [inner, columns]`` with operands in half precision."""
    traffic = HALF_BYTES * batch * (rows * inner + inner * columns + rows * columns)
    return Operator(name, MATRIX, 2.0 * batch * rows * inner * columns, traffic, (rows, inner, columns), dtype)


def elementwise(name: str, size: float, passes: float) -> Operator:
    """Reads and writes ``passes`` tensors of ``size`` bytes in all."""
    return Operator(name, VECTOR, bytes=size * passes)
