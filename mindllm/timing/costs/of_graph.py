"""How long an operator of a compiled graph takes: what it costs (``mindllm.compiled.graph.cost``), timed like all others."""

from __future__ import annotations

from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.compiled.graph.cost import ATTENTION as FLASH
from mindllm.compiled.graph.cost import ATTENTION_GRADIENT, bytes_of, cost
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import ATTENTION, MATRIX, VECTOR, Operator
from mindllm.timing.device import Device
from mindllm.units import MILLISECONDS

UNEVEN = "AlltoAllV"  # MindFormers makes its groups itself, so that the compiler knows them by name alone


def operator_time(graph: CompiledGraph, node: Node, device: Device) -> float:
    """Milliseconds of one run of ``node``.

    Raises:
        UserError: the device lacks a figure or a link for it.
    """
    if node.exchanges:
        whole = max(bytes_of(graph.input_tensors(node)), bytes_of(node.tensors))
        return MILLISECONDS * exchange_seconds(node.op, whole, _group(graph, node), device)
    spent = cost(graph, node)
    given = [*graph.input_tensors(node), *node.tensors]
    dtype = given[0].dtype if given else ""
    if not spent.products:
        if not spent.flops and not spent.bytes:
            return 0.0
        one = Operator(node.op, VECTOR, spent.flops, spent.bytes)
    elif node.op in (FLASH, ATTENTION_GRADIENT):
        one = Operator(node.op, ATTENTION, spent.products, spent.bytes, dtype=dtype)
    else:
        one = Operator(node.op, MATRIX, spent.products, spent.bytes, _sizes(node, spent.products), dtype)
    return MILLISECONDS * operator_seconds(one, device)


def _group(graph: CompiledGraph, node: Node) -> Group:
    """The group of an exchange. One with uneven parts says how many there are; its ranks are then taken for neighbours."""
    given = graph.input_tensors(node)
    if node.op == UNEVEN and len(given) > 1 and given[1].shape:
        return Group(given[1].shape[0])
    return group_of(node.ranks)


def group_of(ranks: tuple[int, ...]) -> Group:
    """The group of these ranks, by how many there are and how far apart."""
    if len(ranks) < 2:
        return Group(1)
    return Group(len(ranks), max(1, (max(ranks) - min(ranks)) // (len(ranks) - 1)))


def transfer_time(size: float, distance: int, device: Device) -> float:
    """Milliseconds that ``size`` bytes take to the rank that is ``distance`` further on."""
    return MILLISECONDS * exchange_seconds("Send", size, Group(2, distance), device)


def _sizes(node: Node, products: float) -> tuple[float, float, float]:
    """Rows, inner and columns of one of a node's products."""
    shape = node.shapes[0]
    rows, columns = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    count = 1.0
    for size in shape[:-2]:
        count *= size
    return float(rows), products / (2.0 * count * rows * columns), float(columns)
