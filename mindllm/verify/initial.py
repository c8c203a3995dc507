"""Compare initial weights and tables of each rank with its parts of the single device's.

The compared steps start from other weights, which hide no mistake. How a weight starts is read from the rank's own program, and
its part is cut by the rank's own layout, as ``mindllm/train/engine/cluster_rank.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import updated_weights
from mindllm.compiled.execute.state import slices_of, whole_shape
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.initial import CONSTANT
from mindllm.models.weights import drawn_value

TABLES = "tables."
ROUNDING = 1e-6


def weight_problems(graphs: Sequence[CompiledGraph], seed: int, initial: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield each weight that starts differently on some rank, once.

    Args:
        graphs: of the ranks.
        seed: of the run.
        initial: initial weights of a single device, by name.
    """

    @cache
    def draw(name: str, shape: tuple[int, ...], begins: tuple[Any, ...]) -> np.ndarray:
        kind, value = begins
        if kind == CONSTANT:
            return np.full(shape, value, np.float32)
        array = drawn_value(name, shape, SimpleNamespace(**{kind: value}), seed)
        assert array is not None
        return array

    reported = set()
    for graph in graphs:
        updated = set(updated_weights(graph.parameters))
        for name, parameter in graph.parameters.items():
            if name not in initial or name in reported:
                continue
            if parameter.begins is None:
                problem = "its initial value is unknown" if name in updated else ""
            else:
                part = slices_of(parameter, graph.rank)
                array = draw(name, whole_shape(parameter), parameter.begins)
                problem = _difference(array[part], initial[name][part])
            if problem:
                reported.add(name)
                yield f"{name} on rank {graph.rank}, before the first step: {problem}"


def _difference(array: np.ndarray, expected: np.ndarray) -> str:
    if array.shape != expected.shape:
        return f"shape {list(array.shape)} instead of {list(expected.shape)}"
    error = float(np.max(np.abs(array.astype(expected.dtype) - expected), initial=0.0))
    return f"off by {error:.2e}" if error else ""


def table_problems(
    graphs: Sequence[CompiledGraph], tables: Mapping[str, np.ndarray], positions: np.ndarray
) -> Iterator[str]:
    """Yield tables (angles of rotary embeddings, masks) that differ from the single device.

    A table with another shape or dtype on ranks, such as the mask of a fused attention, is compared only through its use.

    Args:
        graphs: of the ranks.
        tables: of the single device, by :func:`name_in_tables`.
        positions: order of a sequence's tokens on the ranks. Ranks that share a sequence have parts of a table.
    """
    for graph in graphs:
        for parameter in graph.parameters.values():
            table, expected = parameter.initial, tables.get(name_in_tables(parameter.name))
            if table is None or expected is None:
                continue
            if table.shape == parameter.shape and expected.shape == whole_shape(parameter):
                ordered = expected[positions] if len(expected) == len(positions) else expected
                expected = ordered[slices_of(parameter, graph.rank)]
            if (table.shape, table.dtype) != (expected.shape, expected.dtype):
                continue
            error = float(np.max(np.abs(np.subtract(table, expected, dtype=np.float64)), initial=0.0))
            if not error <= ROUNDING:
                yield f"{parameter.name} on rank {graph.rank}: off by {error:.2e} from the table of a single device"


def name_in_tables(name: str) -> str:
    """Return ``contexts.0.rotary_cos`` for ``model.tables.1.contexts.0.rotary_cos``, with or without the stage's number."""
    inside = name.rpartition(TABLES)[2]
    stage, dot, rest = inside.partition(".")
    return rest if dot and stage.isdecimal() else inside
