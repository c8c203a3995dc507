"""What goes wrong on one rank alone: a gradient that overflows there, of which the other ranks must be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mindllm.compiled.execute.rank_interpreter import RankInterpreter
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.errors import RunFailed

PRODUCTS = ("MatMul", "BatchMatMul")
TRANSPOSED = 2  # operand of a product that says whether its first factor is transposed


class Overflow:
    """Makes one element of the first weight gradient that a rank computes infinite.

    No other gradient is computed from it: ranks that do not share the weight learn of it through the global norm alone.
    ``scope`` says where it was; empty until then.
    """

    def __init__(self, graph: CompiledGraph | None) -> None:
        self.graph = graph
        self.scope = ""

    def __call__(self, node: Node, result: Any) -> Any:
        if self.graph is None or self.scope or not is_weight_gradient(self.graph, node):
            return result
        self.scope = f"{node.op} on rank {self.graph.rank} at {node.scope}"
        spoiled = np.array(result)
        spoiled.reshape(-1)[0] = np.inf
        return spoiled


def is_weight_gradient(graph: CompiledGraph, node: Node) -> bool:
    """Whether a node is the product of transposed gradients with a layer's input.

    No product of a model transposes its first factor. Where the node stands does not tell: the compiler joins those of several
    copies of a layer into one of its own, outside of the backward pass.
    """
    if node.op not in PRODUCTS or len(node.inputs) <= TRANSPOSED:
        return False
    return graph.constants.get(node.inputs[TRANSPOSED]) is True


@contextmanager
def overflowing(machines: Sequence[RankInterpreter], index: int | None) -> Iterator[Overflow]:
    """A gradient of one of the machines overflows inside; None: of no machine.

    Raises:
        RunFailed: the machine ended its step and computed no gradient of a weight.
    """
    if index is None:
        yield Overflow(None)
        return
    machine = machines[index]
    machine.fault = fault = Overflow(machine.graph)
    try:
        yield fault
    finally:
        machine.fault = None
    if not fault.scope:
        raise RunFailed(f"rank {machine.rank} computes no gradient of a weight: an overflow there cannot be made")
