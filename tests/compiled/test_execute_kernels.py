"""Every elementary operator in numpy against MindSpore's own CPU kernel, and rounding to short floating types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mindllm.compiled.execute.elementary import ELEMENTARY
from mindllm.compiled.execute.kernels import choose, cpu_kernel, held, rounded
from mindllm.compiled.graph.compiled_graph import Node, TensorType

RANDOM = np.random.default_rng(3)
A, B = (RANDOM.uniform(0.5, 2, (4, 6)).astype(np.float32) for _ in range(2))
X = RANDOM.normal(size=(4, 6)).astype(np.float32)
FOUR = RANDOM.normal(size=(2, 3, 4, 6)).astype(np.float32)
INDICES = np.array([2, 0, 3, 2], np.int32)
ONE, ZERO = np.float32(1.0).reshape(()), np.float32(0.0).reshape(())
INTEGERS = np.array([[5, 7], [9, 2]], np.int32)
OPERANDS: dict[str, list[tuple]] = {
    **{op: [(A, B), (FOUR, X)] for op in ("Add", "Sub", "Mul", "Div", "RealDiv", "Maximum", "Minimum")},
    **{op: [(A, 1.5), (ONE, 1.5)] for op in ("Muls", "Divs")},
    **{op: [(A,)] for op in ("Neg", "Square", "Sqrt", "Rsqrt", "Reciprocal", "Exp", "Log", "SiLU")},
    "IsFinite": [(np.float32([1, np.inf, np.nan]),)],
    "Tanh": [(X,)],
    "TanhGrad": [(np.tanh(X), A)],
    "ReLU": [(X,)],
    "ReluGrad": [(A, X)],
    "GeLU": [(3 * X,)],
    "GeLUGrad": [(A, 3 * X, X)],
    "FastGeLU": [(3 * X,)],
    "FastGeLUGrad": [(A, 3 * X)],
    "FloorDiv": [(INTEGERS, np.array(2, np.int32))],
    "Equal": [(INTEGERS, np.array(7, np.int32))],
    "SiLUGrad": [(A, X)],
    "MatMul": [(A, B, True, False), (A, B, False, True)],
    "BatchMatMul": [(FOUR, FOUR, False, True), (FOUR, FOUR, True, False)],
    "Reshape": [(A, (3, 8)), (A, (-1,))],
    "Transpose": [(FOUR, (0, 2, 1, 3))],
    "ExpandDims": [(A, 0)],
    "Tile": [(A, (2, 1))],
    "Concat": [((A, B), -1), ((A, B), 0)],
    "Split": [(A, -1, 2)],
    "SplitWithSize": [(A, (1, 3), 0)],
    "StridedSlice": [
        (A, (1, 0), (3, 6), (1, 2), 0, 0, 0, 0, 0),
        (A, (1, 2), (3, 4), (1, 1), 1, 2, 0, 0, 0),
        (FOUR, (1, 0, 2), (2, 3, 3), (1, 2, 1), 0, 0, 0, 0, 5),
        (A, (0, 5), (4, 1), (2, -2), 0, 0, 0, 0, 0),
    ],
    "Gather": [(A, INDICES, 0, 0), (FOUR, INDICES, -2, 0), (FOUR, INDICES[:, None][:2], 2, 1)],
    "OneHot": [(INDICES, 5, ONE, ZERO, -1)],
    "UnsortedSegmentSum": [(A, INDICES, 5)],
    "ReduceSum": [(FOUR, (1, 3), False, False), (FOUR, (), False, False)],
    "ReduceMax": [(A, (-1,), True)],
    "ReduceMean": [(A, (-1,), True)],
    "SumExt": [(FOUR, (0, 2), False, None)],
    "AddN": [((A, B, X),)],
    "ZerosLike": [(A,)],
    "ZerosLikeExt": [(A, None)],
}


def node(op: str, dtype: str = "float32", **attributes) -> Node:
    return Node(op, "node", (), TensorType((), dtype), f"Default/{op}-op0", attributes)


def test_every_elementary_operator_is_compared():
    assert OPERANDS.keys() == ELEMENTARY.keys()


@pytest.mark.parametrize("op", OPERANDS)
def test_numpy_computes_what_mindspore_does(op):
    for operands in OPERANDS[op]:
        found, wanted = ELEMENTARY[op](*operands), cpu_kernel(node(op))(*operands)
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        for mine, theirs in pairs:
            assert np.shape(mine) == theirs.shape
            np.testing.assert_allclose(np.asarray(mine, theirs.dtype), theirs, rtol=2e-6, atol=1e-6)


def test_rows_of_a_table_that_another_rank_has_are_zeros():
    found = ELEMENTARY["Gather"](A, np.array([-1, 2, 9], np.int32), 0)
    assert np.array_equal(found, [np.zeros(6), A[2], np.zeros(6)])
    assert np.array_equal(ELEMENTARY["OneHot"](np.array([-3, 1]), 2, ONE, ZERO), [[0, 0], [0, 1]])


def test_slices_that_leave_axes_out_or_add_some_and_drop_others_are_refused():
    for masks in ((0, 0, 2, 0, 0), (0, 0, 0, 1, 2)):
        with pytest.raises(NotImplementedError, match="StridedSlice with masks"):
            ELEMENTARY["StridedSlice"](FOUR, (1, 0, 2), (2, 1, 5), (1, 1, 2), *masks)


def test_a_slice_that_adds_an_axis():
    """By its definition: MindSpore 2.10's kernel on the CPU returns memory it has not written."""
    found = ELEMENTARY["StridedSlice"](A, (0, 1), (1, 3), (1, 1), 0, 0, 0, 1, 0)
    assert np.array_equal(found, A[np.newaxis, 1:3])


def test_results_are_rounded_to_the_declared_dtype():
    assert rounded(np.float32([1 / 3]), ("bfloat16",)) == np.float32(np.float32(1 / 3).astype(ml_dtypes.bfloat16))
    assert rounded(np.float32([1e6]), ("float16",)) == np.inf
    assert held(np.ones(2, ml_dtypes.bfloat16)).dtype == np.float32
    assert choose(node("Cast", "int32"))(np.float32([2.7]), 34).dtype == np.int32


def test_mindspore_kernels_are_chosen_on_request():
    assert choose(node("Mul")) is ELEMENTARY["Mul"]
    assert np.array_equal(choose(node("Mul"), mindspore_kernels=True)(A, B), A * B)


def test_an_operator_without_a_kernel_is_named():
    with pytest.raises(NotImplementedError, match="no kernel of the CPU does"):
        choose(node("GroupedMatmulV4"))(A, B)
