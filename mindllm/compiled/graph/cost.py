"""What an operator costs: floating-point operations, and bytes it reads and writes.

Counts follow from shapes, not from any kernel. One multiplication and one addition are two operations, as everywhere in the
field.

| operators | operations |
|---|---|
| matrix products, ``[.., m, k] x [.., k, n]`` | ``2 m k n`` for each matrix |
| GroupedMatmul, ``[rows, k]`` by one of ``[experts, k, n]`` each | ``2 rows k n``, those behind the last group included |
| FlashAttentionScore | ``4 s_q s_kv d`` a head and sequence: two products (Dao et al., 2022); half if causal; what a band has |
| its gradient | 2.5 times as many: five products instead of two (Dao, 2023, section 3.1) |
| others with arithmetic | operations for each element of the largest tensor, from :data:`PER_ELEMENT` |
| those that only move, compare or choose (:data:`WITHOUT_ARITHMETIC`) | 0 |
| all the rest | not known: such operators are named, not counted as nothing |

Bytes are those of all inputs and outputs, each once. Views and what only orders operators cost nothing; a slice and a lookup
read what they yield.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph, Node, TensorType

SIZES = {
    **dict.fromkeys(("bool", "int8", "uint8", "int4"), 1),  # int4: two codes, which MindSpore counts as one element
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
PRODUCTS = frozenset(
    {
        *("MatMul", "BatchMatMul", "MatMulExt", "BatchMatMulExt", "Mm", "Dense", "MatMulV2", "BatchMatMulV2"),
        "WeightQuantBatchMatmul",
    }
)
GROUPED = "GroupedMatmul"
ATTENTION, ATTENTION_GRADIENT = "FlashAttentionScore", "FlashAttentionScoreGrad"
BACKWARD_RATIO = 2.5
CAUSAL, BAND = (2, 3), 4  # values of the input sparse_mode: causal, aligned left or right; a band, aligned right
PRE_TOKENS, NEXT_TOKENS_END = -5, -3  # where among its inputs the bounds of a band stand
SEQUENCE_DIMENSION = {"BSH": 1, "BNSD": 2, "SBH": 0, "BSND": 1, "TND": 0}
LAYOUT_CODES = tuple(SEQUENCE_DIMENSION)  # MindSpore also writes a layout as its place in this order

PER_ELEMENT = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Muls", "Div", "Divs", "RealDiv", "AssignAdd", "AssignSub", "Neg", "Abs"), 1),
    **dict.fromkeys(("Sqrt", "Square", "Exp", "Log", "Reciprocal", "Maximum", "Minimum", "AddExt", "SubExt"), 1),
    **dict.fromkeys(
        ("ReduceSum", "ReduceMax", "ReduceMean", "ReduceMin", "SumExt", "MeanExt", "BiasAdd", "BiasAddGrad"), 1
    ),
    **dict.fromkeys(("Sigmoid", "Tanh", "Rsqrt", "Pow"), 2),
    "AddN": 1,
    "SiLU": 4,  # x / (1 + exp(-x))
    "SiLUGrad": 7,
    "Swiglu": 5,
    "SwigluGrad": 10,
    "GeLU": 9,
    "GeLUGrad": 14,
    "Softmax": 5,  # maximum, difference, exponential, sum, quotient
    "SoftmaxBackward": 4,
    "RmsNorm": 4,  # square, sum, two products (Zhang and Sennrich, 2019)
    "RmsNormGrad": 9,
    "LayerNorm": 7,
    "LayerNormGrad": 13,
    **dict.fromkeys(("ReLU", "ReluGrad", "Outer", "EmbeddingDenseBackward"), 1),
    **dict.fromkeys(("Addcmul", "PowTensorScalar"), 2),
    "ApplyMomentum": 4,  # v = m v + g; w = w - r v
    "RotaryPositionEmbedding": 3,
    "RotaryPositionEmbeddingGrad": 3,
    "AdamWeightDecay": 13,
    "Adam": 12,
    "MoeTokenPermuteGrad": 1,  # rows of a token added up
    **dict.fromkeys(("MoeTokenUnpermute", "InnerMoeTokenUnpermute"), 2),  # weighted, and added up
    "MoeTokenUnpermuteGrad": 3,  # a product for the rows, a product and a sum for their weights
    **dict.fromkeys(("UnsortedSegmentSum", "ScatterNd", "FloorDiv", "CumSum", "GatherDGradV2"), 1),
    "SigmoidGrad": 3,
    **dict.fromkeys(("TanhGrad", "RsqrtGrad", "SqrtGrad"), 2),
}
VIEWS = ("ExpandDims", "Load", "Reshape", "Squeeze", "TupleGetItem")
ORDER = ("Call", "Constant", "Depend", "MakeTuple", "Partial", "StopGradient", "Switch", "UpdateState")
WITHOUT_TRAFFIC = frozenset(VIEWS + ORDER)
COMPARES = (
    "Equal",
    "NotEqual",
    "Less",
    "LessEqual",
    "Greater",
    "GreaterEqual",
    "LogicalAnd",
    "LogicalOr",
    "LogicalNot",
    "IsFinite",
    "Select",
    "SortExt",
    "ReduceAll",
    "ReduceAny",
    "All",
    "ArgMaxWithValue",
    "NPUGetFloatStatusV2",
    "NPUClearFloatStatusV2",
)
MOVES = (
    *("Assign", "BroadcastTo", "Cast", "Concat", "Copy", "Fill", "FillV2", "Full", "Gather", "GatherD", "GetNext"),
    *("Embedding", "MaskedFill", "MoeTokenPermute", "MoveTo", "OneHotExt"),
    *("MakeList", "OneHot", "OnesLike", "Ones", "Pack", "Range", "ScalarToTensor", "Shape", "Slice", "SliceExt"),
    *("Split", "SplitV", "SplitWithSize", "Stack", "StridedSlice", "StridedSliceGrad", "TensorMove", "TensorShape"),
    *(
        "Tile",
        "TopK",
        "TopkExt",
        "Transpose",
        "TransposeExtView",
        "Unstack",
        "Zeros",
        "ZerosLike",
        "ZerosLikeExt",
        "_VirtualDataset",
    ),
)
WITHOUT_ARITHMETIC = WITHOUT_TRAFFIC | COLLECTIVES | frozenset(COMPARES + MOVES)
READS_WHAT_IT_YIELDS = frozenset({"Gather", "Embedding", "StridedSlice", "Slice", "SliceExt"})


@dataclass(frozen=True)
class Cost:
    """Of one run of an operator. ``products`` are the operations inside matrix products, which other units execute."""

    flops: float = 0.0
    products: float = 0.0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.products + other.products, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.products * times, self.bytes * times)


def cost(graph: CompiledGraph, node: Node) -> Cost:
    """Return the cost of one run of ``node`` on this rank."""
    given = graph.input_tensors(node)
    products = _products(graph, node, given)
    return Cost(products or _arithmetic(node, given), products, _traffic(node, given))


def uncounted(graph: CompiledGraph) -> tuple[str, ...]:
    """Return the names of operators without a formula for their operations. Only their bytes count."""
    known = WITHOUT_ARITHMETIC | PRODUCTS | PER_ELEMENT.keys() | {GROUPED, ATTENTION, ATTENTION_GRADIENT}
    return tuple(sorted({node.op for node in graph.nodes() if node.op not in known and not node.exchanges}))


def step_cost(graph: CompiledGraph, nodes: Iterable[Node] | None = None) -> Cost:
    """Return the cost of ``nodes``, or of all, in a step. A node counts as often as its function runs."""
    expected = None if nodes is None else {node.name for node in nodes}
    total = Cost()
    for function in graph.functions:
        for node in function.nodes:
            if expected is None or node.name in expected:
                total += cost(graph, node) * graph.executions[function.name]
    return total


def size(tensor: TensorType) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor.shape) * SIZES.get(tensor.dtype, 0)


def bytes_of(tensors: Iterable[TensorType]) -> int:
    """Bytes of several tensors together."""
    return sum(map(size, tensors))


def _products(graph: CompiledGraph, node: Node, given: Sequence[TensorType]) -> float:
    if node.op in PRODUCTS and node.shapes and given:
        left, out = given[0].shape, node.shapes[0]
        rows = out[-2] if len(out) > 1 else 1
        inner = math.prod(left[-2:]) // rows if rows else 0
        return 2.0 * math.prod(out) * inner
    if node.op == GROUPED and node.shapes and given:
        return 2.0 * math.prod(given[0].shape) * node.shapes[0][-1]
    if node.op in (ATTENTION, ATTENTION_GRADIENT) and len(given) > 1:
        layout, mode = (graph.constants.get(name) for name in node.inputs[-2:])
        if isinstance(layout, int) and 0 <= layout < len(LAYOUT_CODES):
            layout = LAYOUT_CODES[layout]
        dimension = SEQUENCE_DIMENSION.get(str(layout), 1)
        queries, keys = (tensor.shape[dimension] for tensor in given[:2])
        share = 0.5 if mode in CAUSAL else 1.0
        if mode == BAND:
            before, after = (graph.constants.get(name) for name in node.inputs[PRE_TOKENS:NEXT_TOKENS_END])
            share = _share_of_band(queries, keys, before, after)
        forward = 4.0 * math.prod(given[0].shape) * keys * share
        return forward if node.op == ATTENTION else forward * BACKWARD_RATIO
    return 0.0


def _share_of_band(queries: int, keys: int, before: Any, after: Any) -> float:
    """Return the share of ``queries x keys`` in a band aligned at the last of both, with half of the pairs on its edges."""
    row = np.arange(queries) + (keys - queries)
    first, last = np.maximum(row - before, 0), np.minimum(row + after + 1, keys)
    edges = (row - before >= 0) & (row - before < keys), (row + after < keys) & (row + after >= 0)
    seen = np.maximum(last - first, 0).sum() - 0.5 * (edges[0].sum() + edges[1].sum())
    return float(seen) / (queries * keys)


def _arithmetic(node: Node, given: Sequence[TensorType]) -> float:
    if node.op not in PER_ELEMENT:
        return 0.0
    elements = [math.prod(tensor.shape) for tensor in (*given, *node.tensors)]
    if node.op == "AddN":
        return float(sum(math.prod(tensor.shape) for tensor in given[1:]))
    return float(PER_ELEMENT[node.op] * max(elements, default=0))


def _traffic(node: Node, given: Sequence[TensorType]) -> int:
    if node.op in WITHOUT_TRAFFIC:
        return 0
    if node.op in READS_WHAT_IT_YIELDS:
        return 2 * bytes_of(node.tensors)
    if node.op == "Assign":
        return bytes_of(given)  # the value is read, the parameter written
    return bytes_of(given) + bytes_of(node.tensors)
