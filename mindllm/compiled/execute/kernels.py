"""What computes a node: an elementary operator in numpy, MindSpore's own CPU kernel, or a reference for a fused one.

Values are fp32 arrays whatever the graph's floating type: a result whose type is bf16 or fp16 is rounded to it, as on an
accelerator that adds in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from mindllm.compiled.execute.elementary import ELEMENTARY
from mindllm.compiled.execute.references import REFERENCES
from mindllm.compiled.graph.compiled_graph import Node
from mindllm.errors import RunFailed

Value = Any
Kernel = Callable[..., Value]
ROUNDED = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class NoKernel(RunFailed):
    """An operator that nothing here can compute; names it with its rank and its place in the model."""


def choose(node: Node, mindspore_kernels: bool = False) -> Kernel:
    """Return the kernel of ``node``. ``mindspore_kernels`` prefers MindSpore's kernel.

    A kernel raises NotImplementedError for what it cannot compute.
    """
    if node.op in REFERENCES:
        return REFERENCES[node.op]
    if node.op == "Cast":
        return _cast(node.dtypes[0])
    if node.op in ELEMENTARY and not mindspore_kernels:
        return ELEMENTARY[node.op]
    return cpu_kernel(node)


def held(value: Value) -> Value:
    """Return a constant or an input of the graph as it is stored here: fp32 instead of half precision."""
    if isinstance(value, np.ndarray) and value.dtype in ROUNDED.values():
        return value.astype(np.float32)
    return tuple(map(held, value)) if isinstance(value, tuple) else value


def rounded(value: Value, dtypes: tuple[str, ...]) -> Value:
    """Return results in the dtypes that the graph declares, or rounded to these."""
    if isinstance(value, tuple):
        return tuple(_round(item, dtype) for item, dtype in zip(value, dtypes, strict=False))
    return _round(value, dtypes[0]) if dtypes else value


def _round(value: Value, dtype: str) -> Value:
    if value is None:
        return None
    if dtype in ROUNDED:
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(ROUNDED[dtype]).astype(np.float32)
    return np.asarray(value, dtype)


def _cast(dtype: str) -> Kernel:
    """To ``dtype``; a short floating one is what ``rounded`` does to every result."""
    target = np.dtype(np.float32 if dtype in ROUNDED else dtype)
    return lambda x, *_: np.asarray(x).astype(target)


def _reason(error: Exception) -> str:
    """Return the first meaningful line of MindSpore's message."""
    lines = (line.strip(" -") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def cpu_kernel(node: Node) -> Kernel:
    """MindSpore's kernel on its CPU back end, with the attributes of the node."""
    import mindspore as ms
    from mindspore.ops.primitive import Primitive, _run_op

    primitive = Primitive(node.op)
    for name, value in node.attributes.items():
        primitive.add_prim_attr(name, value)
    if node.op == "AddN":
        primitive.add_prim_attr("n", 0)

    def tensor(value: Value) -> Value:
        if isinstance(value, np.ndarray | np.generic):
            return ms.Tensor(np.array(value, order="C"))  # ascontiguousarray would add an axis to a scalar
        return tuple(map(tensor, value)) if isinstance(value, tuple) else value

    def run(*operands: Value) -> Value:
        try:
            result = _run_op(primitive, node.op, tuple(map(tensor, operands)))
            return tuple(item.asnumpy() for item in result) if isinstance(result, tuple | list) else result.asnumpy()
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotImplementedError(f"no kernel of the CPU does ({_reason(error)})") from None

    return run
