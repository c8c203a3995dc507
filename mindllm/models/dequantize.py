"""A frozen projection that is held in codes: its tensors, and the cell that makes the matrix of them whenever it is needed."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import ops as P
from mindspore.common.initializer import initializer
from mindspore.ops import Primitive

from mindllm.architecture.quantization import CODES, COLUMNS, SCALES, ZEROS, CodeSpec
from mindllm.quantize import byte_table

TYPES = {CODES: ms.uint8, SCALES: ms.float32, ZEROS: ms.float32, COLUMNS: ms.int32}


class DequantizedWeight(nn.Cell):
    """The matrix ``[out, in]`` of codes, in float32.

    A byte is looked up in a table of values, so that all kinds of codes have one graph. The result is recomputed for the
    gradient: saved, it would be the matrix that codes replace.

    ``cpu`` makes it wait for the other operand of its product: that back end starts every operator with complete inputs, and
    would compute the matrices of all layers together. Scales and zero points are also expanded over their groups: for operands of
    different shapes, a CPU kernel of MindSpore 2.10 stores the index of the operands' elements for every element of the result.
    That is 16 bytes, four times the matrix.
    """

    def __init__(self, spec: CodeSpec, cpu: bool) -> None:
        super().__init__()
        self.spec = spec
        shapes = spec.shapes()
        self.codes = _parameter(CODES, shapes)
        self.scales = _parameter(SCALES, shapes)
        self.has_zeros = spec.has_zeros
        if spec.has_zeros:
            self.zeros = _parameter(ZEROS, shapes)
            self.subtract = _again(P.Sub())
        self.ordered = spec.ordered
        if spec.ordered:
            self.columns = _parameter(COLUMNS, shapes)
            self.place = _again(P.Gather())
        table = np.array(byte_table(spec.code))
        self.table = Tensor(table)
        self.cpu = cpu
        if cpu:
            self.spread = _again(P.BroadcastTo((*shapes[CODES], table.shape[1])))
        self.shape = (spec.out_features, spec.in_features)
        self.cast = _again(P.Cast())
        self.look_up = _again(P.Gather())
        self.multiply = _again(P.Mul())
        self.reshape = _again(P.Reshape())

    def name_below(self, path: str, drawn: tuple[str, tuple[int, ...], float]) -> None:
        """Names the tensors by the path of the projection; ``drawn``: name, shape and deviation the weight is drawn by."""
        self.drawn = drawn
        for name in self.spec.shapes():
            parameter = getattr(self, name)
            parameter.name = f"{path}.{name}"
            parameter.code_of = (*drawn, self.spec)

    def construct(self, x: Tensor) -> Tensor:
        """``x``: the other operand of the product."""
        codes = self.cast(self.after(self.codes, x), ms.int32)
        values = self.look_up(self.table, codes, 0)  # [out, groups, bytes, codes in a byte]
        if self.has_zeros:
            values = self.subtract(values, self.of_codes(self.zeros, x))
        weight = self.reshape(self.multiply(values, self.of_codes(self.scales, x)), self.shape)
        return self.place(weight, self.columns, 1) if self.ordered else weight

    def of_codes(self, group_values: Tensor, x: Tensor) -> Tensor:
        """``[out, groups, 1, 1]``, or the same for every code of a group."""
        return self.spread(self.after(group_values, x)) if self.cpu else group_values

    def after(self, tensor: Tensor, x: Tensor) -> Tensor:
        """``tensor``, which is not used before ``x`` is there."""
        return ops.depend(tensor, x) if self.cpu else tensor


def _again(operator: Primitive) -> Primitive:
    """Marks an operator whose result is computed again for the gradient; patterns of the YAML can still take the mark away."""
    return operator.add_prim_attr("recompute", True)


def _parameter(name: str, shapes: dict[str, tuple[int, ...]]) -> Parameter:
    parameter = Parameter(initializer("zeros", shapes[name], TYPES[name]), name=name, requires_grad=False)
    parameter.is_constant = True
    return parameter
