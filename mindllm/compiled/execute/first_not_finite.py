"""Where the first number that is not finite comes from, among all operators of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindllm.compiled.execute.cluster import Cluster
from mindllm.compiled.execute.state import ACCUMULATORS
from mindllm.compiled.graph.compiled_graph import Node


class _Found(Exception):
    """Ends the execution at the operator that was looked for."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


def first_not_finite(cluster: Cluster, batch: Mapping[str, np.ndarray]) -> list[str]:
    """Executes a step again, without a loss scale, up to the first operator whose operands are finite and whose result is not.

    Empty where there is none. The step must be one that overflows: it leaves weights and state as they are, and stops here
    before its update.
    """

    def look(rank: int, node: Node, operands: tuple[Any, ...], result: Any) -> None:
        if not _is_finite(result) and all(map(_is_finite, operands)):
            raise _Found(f"{node.op} at {node.scope} on rank {rank}")

    for machine in cluster.machines:
        machine.observer = look
    try:
        cluster.step(batch, 0.0, 1.0)
    except _Found as found:
        return [found.where]
    finally:
        for machine in cluster.machines:
            machine.observer = None
    return []


def weights_not_finite(cluster: Cluster) -> list[str]:
    """Names of parameters that hold a NaN or an infinity on some rank, accumulators aside."""
    bad = {
        name: None
        for machine in cluster.machines
        for name, parameter in machine.parameters.items()
        if not name.startswith(ACCUMULATORS) and not _is_finite(parameter.value)
    }
    return list(bad)


def _is_finite(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_finite, value))
    if isinstance(value, np.ndarray | np.floating) and np.issubdtype(value.dtype, np.floating):
        return bool(np.isfinite(value).all())
    return True
