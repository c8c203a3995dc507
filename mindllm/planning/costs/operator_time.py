"""How long an operator takes on a described device: a roofline of its operations and bytes (``mindllm.compiled.cost``).

| operators | time |
|---|---|
| those that compute | ``max(operations / (peak · efficiency), bytes / (bandwidth · efficiency))`` (Williams et al., 2009) |
| AllGather, ReduceScatter, AlltoAll of ``n`` ranks | ``(n - 1)/n · bytes`` of the whole tensor over the links |
| AllReduce | twice as much: a ReduceScatter and an AllGather (Thakur et al., 2005) |
| Broadcast, Send, Receive | its bytes over one link |

Within a node a rank reaches the ``n - 1`` others over links of their own, at the same time; between nodes over its one link.
"""

from __future__ import annotations

from mindllm.compiled.cost import ATTENTION, ATTENTION_GRADIENT, bytes_of, cost
from mindllm.compiled.graph import COLLECTIVES, CompiledGraph, Node
from mindllm.planning.costs.device import Device

MILLISECONDS = 1e3
ONE_LINK = ("Broadcast", "Send", "Receive")


def operator_time(graph: CompiledGraph, node: Node, device: Device) -> float:
    """Milliseconds of one run of ``node``."""
    if node.op in COLLECTIVES:
        return _exchange_time(graph, node, device)
    spent, share = cost(graph, node), device.efficiency
    given = [*graph.input_tensors(node), *node.tensors]
    dtype = given[0].dtype if given else ""
    reached = share.attention if node.op in (ATTENTION, ATTENTION_GRADIENT) else share.matrix
    products = spent.products / (device.matrix_rate(dtype) * reached.value)
    others = (spent.flops - spent.products) / (device.vector_flops.value * share.vector.value)
    traffic = spent.bytes / (device.memory_bandwidth.value * share.memory.value)
    return MILLISECONDS * max(products, others, traffic)


def _exchange_time(graph: CompiledGraph, node: Node, device: Device) -> float:
    whole = max(bytes_of(graph.input_tensors(node)), bytes_of(node.tensors))
    within = len({rank // device.devices_per_node for rank in node.ranks}) <= 1
    if node.op in ONE_LINK:
        return transfer_time(whole, within, device)
    ranks = max(1, len(node.ranks))
    if ranks == 1:
        return 0.0
    moved = whole * (ranks - 1) / ranks * (2 if node.op == "AllReduce" else 1)
    return transfer_time(moved / (ranks - 1) if within else moved, within, device)


def transfer_time(size: float, within_node: bool, device: Device) -> float:
    """Milliseconds that ``size`` bytes take over one link."""
    link = device.link_within_node if within_node else device.link_between_nodes
    return MILLISECONDS * size / (link.value * device.efficiency.link.value)
